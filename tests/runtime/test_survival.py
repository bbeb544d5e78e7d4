"""Whatever goes wrong in a step: its memory comes back, no thread or file is left, and the next step is right."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from allocated import left_bytes
from models import Batch, fresh, plain, same, train
from planned_steps import smallest, with_sequence
from random_programs import random_sequence
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import rotoff
from rotoff.runtime.links import host_file
from rotoff.runtime.links import pool as link_pool
from rotoff.runtime.links.file import FileLink, FileTicket


class Faults:
    """Raises `error` at the `n`-th event that it is told of (from 1); counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.n = 0
        self.error: Callable[[], BaseException] = MemoryError

    def arm(self, n: int, error: Callable[[], BaseException]) -> None:
        self.count, self.n, self.error = 0, n, error

    def event(self, *_: object) -> None:
        self.count += 1
        if self.count == self.n:
            raise self.error()


class FaultyLink(FileLink):
    """A file link whose every call may fail, as `faults` has it."""

    faults = Faults()

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.faults.event()
        return super().allocate(nbytes)

    def copy_out(self, sources: Any, offset: Any) -> FileTicket:
        self.faults.event()
        return super().copy_out(sources, offset)

    def copy_in(self, targets: Any, offset: Any, *after: FileTicket | None) -> FileTicket:
        self.faults.event()
        return super().copy_in(targets, offset, *after)

    def wait(self, ticket: FileTicket) -> None:
        self.faults.event()
        super().wait(ticket)


ERRORS = {
    "memory": lambda: MemoryError("injected"),
    "device memory": lambda: torch.OutOfMemoryError("injected"),
    "interrupt": lambda: KeyboardInterrupt("injected"),
}


@contextmanager
def nothing_left(wrapped: rotoff.Checkpointable) -> Iterator[None]:
    """Asserts that threads and files are after the block what they were before it, once `wrapped` is closed."""
    wrapped.close()
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    wrapped.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def outcome(run: Callable[[], object]) -> str:
    """The type and the text of what `run` raises, and "" where it raises nothing; no traceback survives."""
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failing_step(wrapped: nn.Module, batch: Batch, message: str) -> None:
    """One step that must fail with `message`."""
    x = batch()
    with Operations():
        said = outcome(lambda: wrapped(x).sum().backward())
    assert message in said


def moving(name: str = "residual", forms: bool = False) -> tuple[rotoff.Checkpointable, Batch, rotoff.Sequence]:
    """A model with a sequence that fetches three values from the host, recomputes, and has smaller forms if asked to."""
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    for seed in range(1000):
        sequence = random_sequence(wrapped.chain, seed, wildness=0.75, forms=forms)
        kinds = [op.kind.value for op in sequence]
        if kinds.count("prefetch") >= 3 and len(kinds) > 30 and {"drop", "F_sel" if forms else "drop"} <= {*kinds}:
            return with_sequence(wrapped, sequence), batch, sequence
    raise AssertionError("no such sequence")


def afresh(wrapped: rotoff.Checkpointable, name: str) -> None:
    """The parameters, buffers and gradients with which `plain(name)` starts."""
    wrapped.load_state_dict(fresh(name)[0].state_dict())
    for p in wrapped.parameters():
        p.grad = torch.zeros_like(p)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Told of every call of the file link, and of every operation within `Operations`."""
    monkeypatch.setattr(link_pool, "FileLink", FaultyLink)
    FaultyLink.faults.arm(0, MemoryError)
    return FaultyLink.faults


class Operations(TorchDispatchMode):
    """Tells `faults` of every operation within that may allocate."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            FaultyLink.faults.event()
        return func(*args, **(kwargs or {}))


def watched_places() -> list[object]:
    call = vars(nn.Module)["__call__"]
    return [call, call.__code__, vars(torch.autograd.Function)["apply"], vars(torch.jit.ScriptFunction)["__call__"]]


UNPATCHED = watched_places()


def nothing_is_watched() -> bool:
    """Whether no mode, no hook of autograd and no wrapper is left."""
    return (
        not torch.overrides._get_current_function_mode_stack()
        and not _get_current_dispatch_mode_stack()
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and watched_places() == UNPATCHED
    )


def fail_at_every_call(
    wrapped: rotoff.Checkpointable, batch: Batch, sequence: rotoff.Sequence, kind: str, first: int, every: int
) -> int:
    """Let operation or call of a link `first` fail in a step, then the one `every` later, to the last; after each one
    nothing is left and the next step is right. Returns how many there are in a step."""
    faults = FaultyLink.faults
    expected = plain("residual", steps=1)
    wrapped(batch()).sum().backward()
    afresh(wrapped, "residual")
    x = batch()
    faults.arm(0, ERRORS[kind])
    with Operations():
        wrapped(x).sum().backward()
    calls = faults.count
    with nothing_left(wrapped):
        for n in range(first, calls + 1, every):
            afresh(wrapped, "residual")
            faults.arm(n, ERRORS[kind])
            left = left_bytes(lambda: failing_step(wrapped, batch, "injected"))
            assert nothing_is_watched(), f"after call {n} of {calls}:\n{sequence}"
            assert left <= 0, f"{left} bytes are left after call {n} of {calls}:\n{sequence}"
            assert same(train(wrapped, batch, steps=1), expected), f"after call {n} of {calls}:\n{sequence}"
    return calls


@pytest.mark.parametrize("every", [2 * len(ERRORS), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_every_call_of_stages_and_links(kind: str, every: int, faults: Faults) -> None:
    """Calls in forwards and replays, copies out and in, waits, allocations, with smaller forms: every second one fails,
    in one way or another; slowly, each in all of them."""
    wrapped, batch, sequence = moving(forms=True)
    first = 1 + [*ERRORS].index(kind) % every
    assert fail_at_every_call(wrapped, batch, sequence, kind, first, every) > 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write and each read; the error names the directory and the cure, or nobody needed those bytes."""
    real, faults = getattr(os, call), Faults()

    def faulty(*args: Any) -> int:
        faults.event()
        return real(*args)

    wrapped, batch, _ = moving()
    expected = plain("residual", steps=1)
    monkeypatch.setattr(host_file.os, call, faulty)
    wrapped(batch()).sum().backward()
    calls, seen = faults.count, 0
    with nothing_left(wrapped):
        for n in range(1, calls + 1):
            afresh(wrapped, "residual")

            def step() -> None:
                nonlocal seen
                x = batch()
                said = outcome(lambda: wrapped(x).sum().backward())
                assert said == "" or "give a directory on a disk with room" in said
                seen += bool(said)

            faults.arm(n, lambda: OSError(number, os.strerror(number)))
            assert left_bytes(step) <= 0
            assert same(train(wrapped, batch, steps=1), expected)
    assert seen >= calls // 2


def test_a_backward_after_an_error_gives_the_bits_of_the_plain_model(faults: Faults) -> None:
    """What the plan had moved is made again on demand."""
    wrapped, batch, _ = moving()
    x, found = batch(), []
    for net in (fresh("residual")[0], wrapped):
        afresh(net, "residual")
        torch.manual_seed(1)
        loss = net(x).sum()
        if net is wrapped:
            faults.arm(1, ERRORS["memory"])
            with pytest.raises(MemoryError, match="injected"):
                loss.backward()
            net.zero_grad(set_to_none=False)
        loss.backward()
        found.append([p.grad for p in net.parameters()])
    assert same(*found)


class Retrying(nn.Module):
    """Tries a layer again that ran out of memory, or whose call failed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            try:
                y = layer(x)
            except MemoryError:
                y = layer(x)
            x = x + y
        return x


def test_a_model_that_catches_an_error_is_right_or_told_that_its_step_is_lost(faults: Faults) -> None:
    """At every call: a call of its own it may repeat; without a copy to the host there is no step."""
    torch.manual_seed(0)
    model, x = Retrying(), torch.randn(16, 8)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(smallest(wrapped, "offload"), mode="offload")
    faults.arm(0, MemoryError)
    with Operations():
        output = wrapped(x)
    calls, said = faults.count, set()
    del output

    def step() -> None:
        wrapped.zero_grad(set_to_none=False)
        with Operations():
            said.add(outcome(lambda: wrapped(x).square().sum().backward()).partition(";")[0])

    with nothing_left(wrapped):
        for n in range(1, calls + 1):
            faults.arm(n, MemoryError)
            said.clear()
            assert left_bytes(step) <= 0
            assert nothing_is_watched()
            if said == {""}:
                assert same([p.grad for p in model.parameters()], expected)
            else:
                (text,) = said
                assert text.startswith(("MemoryError", "ExecutionError: this step was aborted after an error"))
            faults.arm(0, MemoryError)
            wrapped.zero_grad(set_to_none=False)
            wrapped(x).square().sum().backward()
            assert same([p.grad for p in model.parameters()], expected)


def test_an_error_while_measuring_changes_nothing_of_the_users() -> None:
    model, batch = fresh("stateful")
    faults = Faults()
    hooks = [module.register_forward_pre_hook(faults.event) for module in model]
    x = batch()
    state = [b.clone() for b in model.buffers()]
    rotoff.Checkpointable(model).measure(x).close()
    calls = faults.count
    for n in range(1, calls + 1, 1 + calls // 16):
        faults.arm(n, ERRORS["interrupt"])
        wrapped = rotoff.Checkpointable(model)
        generator = torch.get_rng_state()
        with nothing_left(wrapped):
            said = outcome(lambda wrapped=wrapped: wrapped.measure(x))
        # how often something is timed, the clock decides
        assert "KeyboardInterrupt" in said or n > faults.count > calls // 2
        assert same(list(model.buffers()), state)
        assert torch.equal(torch.get_rng_state(), generator)
    for hook in hooks:
        hook.remove()
    wrapped.compute_sequence(smallest(wrapped.measure(x), "joint"))
    assert same(train(wrapped, batch, steps=1), plain("stateful", steps=1))


# -- a process that forks


def in_child(run: Callable[[], Any]) -> Any:
    """What `run` returns in a forked child (JSON), or the error there; its hanging ends the child after five minutes."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(300)
        try:
            said = run()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        content = answer.read()
    os.waitpid(child, 0)
    return json.loads(content) if content else "ended"


class Forked:
    """A model of known gradients under a plan, and an optimizer with `device_limit`; each step draws from seed `k`."""

    def __init__(self, mode: str, placed: str = "") -> None:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(4)]
        self.model, self.x = nn.Sequential(*parts), torch.randn(32, 16)
        self.expected = [self.stepped(copy.deepcopy(self.model), 3)[n] for n in range(3)]
        self.net = rotoff.Checkpointable(self.model, cache_directory=None).measure(self.x)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        if placed:
            limit = {"device_limit": "120 KiB", "optimizer": self.optimizer, "updates": placed}
            self.net.compute_sequence(mode=mode, refine=False, **limit)
            assert any(op.of for op in self.net.sequence)
        else:
            self.net.compute_sequence(smallest(self.net, mode), mode, refine=False)

    def loss(self, k: int) -> torch.Tensor:
        torch.manual_seed(k)
        return self.net(self.x).square().mean()

    def step(self, k: int) -> None:
        self.loss(k).backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stepped(self, model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
        """The parameters after each of so many steps of plain PyTorch."""
        optimizer, found = torch.optim.Adam(model.parameters()), []
        for k in range(steps):
            torch.manual_seed(k)
            model(self.x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([p.detach().clone() for p in model.parameters()])
        return found

    def right(self, k: int) -> bool:
        """Whether the parameters are those after step k."""
        return same([p.detach() for p in self.model.parameters()], self.expected[k])


def both_go_on(of: Forked) -> Any:
    """Fork in the middle of the backward of step 1; returns what came of the step in the child."""
    children: list[int] = []
    read, write = os.pipe()
    middle = list(of.model.parameters())[9]
    hook = middle.register_hook(lambda _: None if children else children.append(os.fork()))
    try:
        said = outcome(lambda: of.step(1)) or of.right(1)
    finally:
        if children == [0]:
            os.write(write, json.dumps(said).encode())
            os._exit(0)
    hook.remove()
    os.close(write)
    with open(read, "rb") as answer:
        content = answer.read()
    os.waitpid(children[0], 0)
    assert said is True
    return json.loads(content)


@pytest.mark.parametrize("mode", ["offload", "joint", "remat"])
@pytest.mark.parametrize("when", ["before", "between", "within", "between two", "before another"])
@pytest.mark.grid(every=3)
def test_a_child_forked_around_a_step_is_right_or_told_so(mode: str, when: str) -> None:
    """And its parent is right."""
    of = Forked(mode)
    of.step(0)
    own = "ExecutionError: this step moved values to the host before the process forked"
    told = True if mode == "remat" else own
    answers = []

    def child_ends(loss: torch.Tensor) -> bool:
        loss.backward()
        of.update()
        return of.right(1)

    if when == "before":  # and then each trains by itself
        answers, told = [in_child(lambda: (of.step(1), of.right(1))[1])], True
        of.step(1)
    elif when == "between":
        loss = of.loss(1)
        answers = [in_child(lambda: child_ends(loss))]
        loss.backward()
        of.update()
    elif when == "within":  # a hook forks
        answers = [both_go_on(of)]
    elif when == "between two":  # backwards of one forward
        loss = of.loss(1)
        loss.backward(retain_graph=True)
        of.optimizer.zero_grad()
        answers, told = [in_child(lambda: child_ends(loss))], True
        loss.backward()
        of.update()
    else:  # the child leaves the step of its parent and begins its own
        loss = of.loss(1)
        answers, told = [in_child(lambda: (of.step(1), of.right(1))[1])], True
        loss.backward()
        of.update()
    assert of.right(1)
    assert all(said is told or (isinstance(told, str) and said.startswith(told)) for said in answers), answers
    of.step(2)
    assert of.right(2)
    of.net.close()


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("when", ["before", "between", "at the update", "writes", "reads", "plans", "loader"])
@pytest.mark.grid(every=3)
def test_a_child_forked_from_placed_training_harms_nobody(updates: str, when: str) -> None:
    of = Forked("joint", updates)
    of.step(0)
    told: Any = "ExecutionError: parameters were placed by the process that this one was forked from"
    if when == "before":
        said = in_child(lambda: of.step(1))
        of.step(1)
    elif when == "between":
        loss = of.loss(1)
        said = in_child(loss.backward)
        loss.backward()
        of.update()
    elif when == "at the update":
        of.loss(1).backward()
        said = in_child(of.update)
        of.update()
    elif when == "writes":
        said, told = in_child(lambda: sum(int(p.data.zero_().any()) for p in of.model.parameters())), 0
        of.step(1)
    elif when == "reads":
        said, told = in_child(lambda: of.right(0)), True
        of.step(1)
    elif when == "plans":
        limit = {"device_limit": "120 KiB", "optimizer": of.optimizer, "updates": updates}
        said = in_child(lambda: (of.net.compute_sequence(refine=False, **limit), of.step(1), of.right(1))[2])
        told = True
        of.step(1)
    else:
        loader = torch.utils.data.DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="fork")
        said, told = [int(one) for one in loader], [1, 2, 3]
        of.step(1)
    assert said == told or (isinstance(told, str) and said.startswith(told)), said
    assert of.right(1)
    of.step(2)
    assert of.right(2)
    of.net.close()


@pytest.mark.slow
def test_a_thousand_steps_do_not_grow() -> None:
    wrapped, batch, _ = moving("tuples")
    x = batch()

    def steps(count: int) -> None:
        for _ in range(count):
            wrapped.zero_grad(set_to_none=False)
            wrapped(x).sum().backward()

    with nothing_left(wrapped):
        steps(10)
        assert left_bytes(lambda: steps(10)) <= 0
        gc.collect()
        objects = len(gc.get_objects())
        gc.disable()  # nothing may need the collector either
        try:
            steps(1000)
            grown = len(gc.get_objects()) - objects
        finally:
            gc.enable()
        assert grown < 200, f"{grown} objects more"


@pytest.mark.parametrize(
    "error", [ValueError("stop"), KeyboardInterrupt(), StopIteration("end"), GeneratorExit()], ids=repr
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_within_a_checkpoint_reaches_the_caller(error: BaseException, reentrant: bool) -> None:
    raised: list[BaseException] = []

    class Pieces(nn.Sequential):
        def piece(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if raised and layer is self[2]:
                raise raised[0]
            return torch.tanh(layer(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(self.piece, layer, x, use_reentrant=reentrant)
            return x

    model, x = Pieces(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(64, 16, requires_grad=True)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    net = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    net.compute_sequence(net.min_mem_limit("remat"), "remat", refine=False)
    raised.append(error)
    with pytest.raises(BaseException) as plainly:  # PyTorch's checkpoint makes a RuntimeError of a StopIteration
        model(x)
    with pytest.raises(type(plainly.value)) as seen:
        net(x)
    assert error in (seen.value, seen.value.__cause__)
    raised.clear()
    model.zero_grad()
    net(x).sum().backward()
    assert same([p.grad for p in model.parameters()], expected)
