"""Whatever goes wrong in a step: its memory comes back, no thread or file is left, and the next step is right."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from allocated import left_bytes
from models import Batch, Does, fresh, same, several
from planned_steps import Beside
from random_programs import random_sequence
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import rotoff
from rotoff.runtime.links import host_file
from rotoff.runtime.links.file import FileLink


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


def moving(forms: bool = False) -> tuple[Beside, Batch]:
    """A model with a sequence that fetches three values from the host, recomputes, and has smaller forms if asked to."""
    model, batch = fresh("residual")
    beside = Beside(model, sample=(batch(),))
    for seed in range(1000):
        sequence = random_sequence(beside.planned.chain, seed, wildness=0.75, forms=forms)
        kinds = [op.kind.value for op in sequence]
        if kinds.count("prefetch") >= 3 and len(kinds) > 30 and {"drop", "F_sel" if forms else "drop"} <= {*kinds}:
            return beside.following(sequence), batch
    raise AssertionError("no such sequence")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Told of every call of the file link, and of every operation within `Operations`."""
    faults = Faults()
    for name in ("allocate", "copy_out", "copy_in", "wait"):
        own = getattr(FileLink, name)
        monkeypatch.setattr(FileLink, name, lambda *args, own=own: (faults.event(), own(*args))[1])
    return faults


class Operations(TorchDispatchMode):
    """Tells `faults` of every operation within that may allocate."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.faults.event()
        return func(*args, **(kwargs or {}))


def no_mode_is_left() -> bool:
    """Nor a hook of autograd."""
    return (
        not torch.overrides._get_current_function_mode_stack()
        and not _get_current_dispatch_mode_stack()
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


def survives(
    wrapped: rotoff.Checkpointable, points: Iterable[int], arm: Callable[[int], object], step: Callable[[], object],
    right: Callable[[], object],
) -> None:  # fmt: skip
    """Each of the events `points` fails in a step; after each one nothing is left, and `right` asserts that the next step
    is."""
    with nothing_left(wrapped):
        for n in points:
            arm(n)
            assert left_bytes(step) <= 0, n
            assert no_mode_is_left(), n
            arm(0)
            right()


@pytest.mark.parametrize("every", [2 * len(ERRORS), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_every_call_of_stages_and_links(kind: str, every: int, faults: Faults) -> None:
    """Calls in forwards and replays, copies out and in, waits, allocations, with smaller forms: every second one fails,
    in one way or another; slowly, each in all of them."""
    beside, batch = moving(forms=True)
    wrapped = beside.planned
    wrapped(x := batch()).sum().backward()

    def step() -> None:
        with Operations(faults):
            said = outcome(lambda: wrapped(x).sum().backward())
        assert "injected" in said or not faults.n

    faults.arm(0, ERRORS[kind])
    step()
    points = range(1 + [*ERRORS].index(kind) % every, 1 + faults.count, every)
    assert faults.count > 40, str(wrapped.sequence)
    survives(wrapped, points, lambda n: faults.arm(n, ERRORS[kind]), step, lambda: beside.step(batch()))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write and each read; the error names the directory and the cure, or nobody needed those bytes."""
    real, faults, seen = getattr(os, call), Faults(), []

    def faulty(*args: Any) -> int:
        faults.event()
        return real(*args)

    beside, batch = moving()
    wrapped = beside.planned
    monkeypatch.setattr(host_file.os, call, faulty)
    wrapped(x := batch()).sum().backward()
    calls = faults.count

    def step() -> None:
        said = outcome(lambda: wrapped(x).sum().backward())
        assert said == "" or "give a directory on a disk with room" in said
        seen.append(bool(said))

    def arm(n: int) -> None:
        faults.arm(n, lambda: OSError(number, os.strerror(number)))

    survives(wrapped, range(1, calls + 1), arm, step, lambda: beside.step(batch()))
    assert sum(seen) >= calls // 2


def retrying(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Tries a layer again that ran out of memory, or whose call failed."""
    for layer in net.layers:
        try:
            y = layer(x)
        except MemoryError:
            y = layer(x)
        x = x + y
    return x


def test_a_model_that_catches_an_error_is_right_or_told_that_its_step_is_lost(faults: Faults) -> None:
    """At every call: a call of its own it may repeat; without a copy to the host there is no step."""
    torch.manual_seed(0)
    model, x = Does(retrying, layers=several(3, 8, 32)), torch.randn(16, 8)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(wrapped.min_mem_limit("offload"), mode="offload")
    faults.arm(0, MemoryError)
    with Operations(faults):
        output = wrapped(x)
    calls = faults.count
    del output

    def gradients() -> bool:
        return same([p.grad for p in model.parameters()], expected)

    def step() -> None:
        wrapped.zero_grad(set_to_none=False)
        with Operations(faults):
            said = outcome(lambda: wrapped(x).square().sum().backward())
        lost = said.startswith(("MemoryError", "ExecutionError: this step was aborted after an error"))
        assert lost if said else gradients()

    def right() -> None:
        step()
        assert gradients()

    survives(wrapped, range(1, calls + 1), lambda n: faults.arm(n, MemoryError), step, right)


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
    Beside(model, sample=(x,)).within("joint").step(batch())


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
        self.plain, self.done = copy.deepcopy(self.model), 0
        self.own = torch.optim.Adam(self.plain.parameters())
        self.net = rotoff.Checkpointable(self.model).measure(self.x)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        if placed:
            limit = {"device_limit": "120 KiB", "optimizer": self.optimizer, "updates": placed}
            self.net.compute_sequence(mode=mode, refine=False, **limit)
            assert any(op.of for op in self.net.sequence)
        else:
            least = "offload" if mode == "joint" else mode  # below it, joint may move nothing
            self.net.compute_sequence(self.net.min_mem_limit(least), mode, refine=False)

    def loss(self, k: int) -> torch.Tensor:
        torch.manual_seed(k)
        return self.net(self.x).square().mean()

    def step(self, k: int) -> None:
        self.loss(k).backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def right(self, k: int) -> bool:
        """Whether the parameters are those of the plain model after step k."""
        while self.done <= k:
            torch.manual_seed(self.done)
            self.plain(self.x).square().mean().backward()
            self.own.step()
            self.own.zero_grad()
            self.done += 1
        return same(list(self.model.parameters()), list(self.plain.parameters()))


def whole_step(of: Forked) -> Callable[[], bool]:
    return lambda: (of.step(1), of.right(1))[1]


def rest_of_step(of: Forked, loss: torch.Tensor) -> Callable[[], bool]:
    return lambda: (loss.backward(), of.update(), of.right(1))[2]


def forked(of: Forked, when: str, how: str) -> Any:
    """What a child makes of step 1 that is forked around it, before its parent ends that step."""
    parent = child = whole_step(of)
    if when in ("between", "between two", "before another"):  # a forward and its backward
        loss = of.loss(1)
        if when == "between two":  # backwards of one forward
            loss.backward(retain_graph=True)
            of.optimizer.zero_grad()
        parent = rest_of_step(of, loss)
        child = child if when == "before another" else parent  # which leaves the step of its parent and begins its own
    elif when == "at the update":
        of.loss(1).backward()
        parent = child = lambda: (of.update(), of.right(1))[1]
    elif when == "writes":
        child = lambda: any(bool(p.data.zero_().any()) for p in of.model.parameters())  # noqa: E731
    elif when == "reads":
        child = lambda: of.right(0)  # noqa: E731
    elif when == "plans":
        limit = {"device_limit": "120 KiB", "optimizer": of.optimizer, "updates": how}
        child = lambda: (of.net.compute_sequence(refine=False, **limit), of.step(1), of.right(1))[2]  # noqa: E731
    elif when == "loads":
        loader = torch.utils.data.DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="fork")
        child = lambda: [int(one) for one in loader] == [1, 2, 3]  # noqa: E731
    said = child() if when == "loads" else in_child(child)
    assert parent()
    return said


MOVED = "ExecutionError: this step moved values to the host before the process forked"
PLACED = "ExecutionError: parameters were placed by the process that this one was forked from"
FORKS = [
    ("between", "offload", MOVED), ("between", "joint", MOVED), ("between", "remat", True),
    *((when, mode, True) for mode in ("offload", "joint", "remat") for when in ("before", "between two", "before another")),
    *((when, updates, PLACED) for updates in ("after", "during") for when in ("before", "between", "at the update")),
    *((when, updates, when != "writes") for updates in ("after", "during") for when in ("writes", "reads", "plans", "loads")),
]  # fmt: skip


@pytest.mark.parametrize(("when", "how", "told"), FORKS, ids=[f"{when} {how}" for when, how, _ in FORKS])
@pytest.mark.grid(every=3)
def test_a_child_forked_around_a_step_is_right_or_told_so(when: str, how: str, told: bool | str) -> None:
    """And its parent is right. how: the mode, or when a plan with a `device_limit` updates."""
    of = Forked("joint", how) if how in ("after", "during") else Forked(how)
    of.step(0)
    said = forked(of, when, how)
    assert said is told or (isinstance(told, str) and said.startswith(told)), said
    assert of.right(1)
    of.step(2)
    assert of.right(2)
    of.net.close()


@pytest.mark.slow
def test_a_thousand_steps_do_not_grow() -> None:
    beside, batch = moving()
    wrapped, x = beside.planned, batch()

    def steps(count: int) -> None:
        for _ in range(count):
            wrapped.zero_grad(set_to_none=False)
            wrapped(x).sum().backward()

    with nothing_left(wrapped):
        steps(10)
        assert left_bytes(lambda: steps(10)) <= 0
        objects = len(gc.get_objects())
        gc.disable()  # nothing may need the collector either
        try:
            steps(1000)
            assert len(gc.get_objects()) - objects < 200
        finally:
            gc.enable()


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
    net = rotoff.Checkpointable(model).measure(x)
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
