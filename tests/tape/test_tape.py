"""What is dropped and made again from a tape is what it was: on the tables of models that change between steps, with
everything dropped, and on what a tape cannot see."""

from __future__ import annotations

import copy
import ctypes
import gc
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
import torch
from on_tape import TAPES, Kernel, OnTape, verdict
from step_by_step import Row
from torch import nn
from torch._higher_order_ops.wrap import InductorCompiledCallable, inductor_compiled_code
from trunks import TABLE, Block, Trunk, along, drawn

import rotoff
from rotoff.runtime.links.spill import Spill
from rotoff.runtime.tape_step import OFF_COURSE, TapeStep
from rotoff.tape.verify import Known, Verified


@pytest.fixture(params=TAPES)
def new_tape(request: pytest.FixtureRequest) -> Any:
    """Each way of following a forward."""
    return request.param


def cases() -> list[Any]:
    """Every sixth row; slowly, all. What nothing sees is found once steps are planned, which compare what they make."""
    rows = [row for row in TABLE if "unseen" not in row.name]
    return [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if n % 6 else []) for n, row in enumerate(rows)]


@pytest.mark.parametrize("row", cases())
def test_everything_dropped_is_made_again(row: Row, new_tape: Any) -> None:
    said = verdict(row, new_tape)
    assert said == "equal" or (row.may_refuse is not None and "error: RuntimeError" in said), said


@pytest.mark.parametrize("row", cases())
def test_everything_dropped_is_made_again_once_verified(row: Row) -> None:
    known = Known()
    said = verdict(row, lambda: Verified(known))
    assert said == "equal" or (row.may_refuse is not None and "error: RuntimeError" in said), said
    assert not known.held and not known.overwritten  # nothing in the table is unseen


# -- what the tape does not see


def test_a_compiled_graph_is_one_operation(new_tape: Any) -> None:
    """Which draws, writes to an argument, and returns what is no tensor."""

    def graph(x: torch.Tensor, total: torch.Tensor, size: int) -> tuple[Any, ...]:
        kept = torch.ops.aten.bernoulli.p(x, 0.5)
        made = torch.ops.aten.mul.Tensor(x, kept)
        torch.ops.aten.copy_.default(total, torch.ops.aten.add.Tensor(total, made))
        return made, size, kept, x

    called = InductorCompiledCallable(lambda inputs: graph(*inputs), torch.fx.symbolic_trace(graph))
    called.__name__ = "graph"

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            made, ctx.size, kept, x = inductor_compiled_code(called, [x, total, 3])
            ctx.save_for_backward(kept, made, x)
            return made

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            kept, made, x = ctx.saved_tensors
            return gradient * kept + ctx.size * made * x, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("total", torch.zeros(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = Compiled.apply(self.linear(x), self.total)
            return x

    def trained(run: nn.Module, net: Net) -> list[torch.Tensor]:
        torch.manual_seed(0)
        run(torch.ones(4, 8)).sum().backward()
        return [*(p.grad for p in net.parameters()), net.total, torch.rand(1)]

    net = Net()
    run = OnTape(other := copy.deepcopy(net), [other.linear], new_tape)
    assert all(map(torch.equal, trained(run, other), trained(net, net)))
    assert run.tapes[0].noted == 6 and run.tapes[0].replayed


def test_compiled_graphs_and_their_numbers_are_told_apart(new_tape: Any) -> None:
    def narrow(x: torch.Tensor, size: int) -> tuple[Any, ...]:
        return torch.ops.aten.sin.default(x), torch.ops.aten.cos.default(x)

    def wide(x: torch.Tensor, size: int) -> tuple[Any, ...]:
        return torch.ops.aten.sin.default(x), torch.ops.aten.repeat.default(x, [1, 8])

    def key(graph: Any, size: Any) -> int:
        called = InductorCompiledCallable(lambda inputs: graph(*inputs), torch.fx.symbolic_trace(graph))
        called.__name__ = "graph"
        with new_tape() as tape:
            tape.enter(1)
            inductor_compiled_code(called, [torch.ones(4, 8), size])
            return int(tape.key)

    assert key(narrow, 3) == key(narrow, 3)
    assert len({key(narrow, 3), key(narrow, 4), key(wide, 3)}) == 3
    assert key(narrow, 0.5) == key(narrow, 1.5)  # a graph with other numbers than these runs as it is


def test_a_compiled_graph_that_runs_as_it_is_reads_no_empty_parameter(new_tape: Any) -> None:
    graph = torch.fx.symbolic_trace(lambda x, share: x * share)
    called = InductorCompiledCallable(lambda inputs: graph(*inputs), graph)
    called.__name__ = "graph"
    (x := torch.ones(8)).untyped_storage().resize_(0)
    with new_tape(), pytest.raises(rotoff.ExecutionError, match="compile the module"):
        inductor_compiled_code(called, [x, 0.5])


Made = tuple[torch.Tensor, torch.Tensor]
calls = 0


class Unseen(torch.autograd.Function):
    """What `make` saves and returns for x, past PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], Made]) -> torch.Tensor:
        saved, out = make(x)
        ctx.save_for_backward(saved)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return g * (2 + saved), None


def of_numpy(x: torch.Tensor) -> Made:
    """Nothing that PyTorch made."""
    return (y := torch.from_numpy(x.detach().numpy() * 2.0)), y


def foreign(x: torch.Tensor) -> Made:
    """Fills by ctypes a tensor that PyTorch made."""
    y, source = torch.empty_like(x), (x.detach() * 2).contiguous()
    ctypes.memmove(y.data_ptr(), source.data_ptr(), y.nbytes)
    return y, y


def writes_its_input(x: torch.Tensor) -> Made:
    """Changes by NumPy what another stage made."""
    x.detach().numpy()[:, :4] *= 0.5
    return x, x * 3


def counts(x: torch.Tensor) -> Made:
    """Another result in each call."""
    global calls
    calls += 1
    return torch.from_numpy(x.detach().numpy().copy()), x * (1 + 0.1 * calls)


def trunk_with(make: Callable[[torch.Tensor], Made]) -> type[Trunk]:
    return along(lambda net, x, n: torch.tanh(Unseen.apply(torch.sin(x), make)) if n % 2 else x)


class Borders(Trunk):
    """The function runs at the start of a block, on what the block before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_pre_hook(lambda module, args: (Unseen.apply(args[0], writes_its_input),))


def gradients(run: nn.Module, net: nn.Module, n: int) -> list[torch.Tensor]:
    net.zero_grad()
    x = drawn(n).requires_grad_()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "make",
    [*map(trunk_with, (of_numpy, foreign, writes_its_input, counts)), Borders],
    ids=["numpy", "ctypes", "its input", "counts", "borders"],
)
def test_what_is_unseen_is_found_and_held(make: type[nn.Module]) -> None:
    global calls
    torch.manual_seed(0)
    net = make()
    known = Known()
    for n in range(3):
        calls = n
        expected = gradients(net, net, n)
        calls = n
        run = OnTape(net, list(net.blocks), lambda: Verified(known))  # type: ignore[arg-type]
        got = gradients(run, net, n)
        assert all(map(torch.equal, got, expected))
        assert run.tapes[0].replayed or n == 0


def test_what_is_unseen_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net, known = trunk_with(foreign)(), Known()
    for n in range(2):
        gradients(OnTape(net, list(net.blocks), lambda: Verified(known)), net, n)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "aten.empty_like.default" in told[0]


def test_a_stage_that_is_not_known_is_kept(new_tape: Any) -> None:
    """On a plain tape, which does not verify, nothing is made again that was not verified before."""
    torch.manual_seed(0)
    net, known = trunk_with(foreign)(), Known()
    for n, make in enumerate([new_tape, Verified, new_tape]):
        expected = gradients(net, net, n)
        run = OnTape(net, list(net.blocks), lambda make=make: make(known))
        assert all(map(torch.equal, gradients(run, net, n), expected))
        assert bool(run.tapes[0].replayed) is (n > 0)


# -- what it costs


def test_dropped_bytes_are_gone_and_only_what_is_needed_runs_again(new_tape: Any) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(6)])
    run = OnTape(blocks, list(blocks), new_tape)
    out = run(drawn(0).requires_grad_())
    (tape,) = run.tapes
    saved = [content for stage in tape.begins for content in tape.saved_contents(stage)]
    alive = [content for content in saved if content.storage(seen=True) is not None]
    # a residual stream is alive nowhere once the next block has its own; all but the result is gone
    assert len(alive) <= 1 and len(saved) > 20
    out.sum().backward()
    assert 0 < tape.replayed < tape.noted * 7 / 2  # each block from the batch on, but not its last operation
    assert not any(tape.saved_contents(stage) for stage in tape.begins)


def test_a_graph_that_is_dropped_frees_the_tape(new_tape: Any) -> None:

    blocks = nn.Sequential(*[Block() for _ in range(3)])
    run = OnTape(blocks, list(blocks), new_tape)
    out = run(drawn(0))
    tape = weakref.ref(run.tapes.pop())
    gc.disable()
    try:
        del out
        assert tape() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("change", ["add_", "data"])
def test_what_was_changed_in_place_raises_as_in_pytorch(change: str, new_tape: Any) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    out = OnTape(net, list(net), new_tape)(drawn(0))
    with torch.no_grad():
        (net[2].weight if change == "add_" else net[0].weight).add_(1.0)
    shape = r"\(16, 16\)"
    with pytest.raises(RuntimeError, match=rf"modified by an inplace operation.* of shape {shape}"):
        out.sum().backward()


def test_held_contents_that_others_hold_are_compared(new_tape: Any) -> None:
    """The caller changes in place what nothing saves and a plan holds: it is made again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Identity(), nn.Tanh(), nn.Linear(16, 16))
    seen: list[torch.Tensor] = []
    net[0].register_forward_hook(lambda m, a, out: seen.append(out))
    expected = torch.autograd.grad(net(drawn(0)).sum(), list(net.parameters()))
    run = OnTape(net, [net[0]], new_tape)
    with run.recording() as tape:
        out = net(drawn(0))
        tape.content_of(seen[-1]).hold(seen[-1].untyped_storage())
    with torch.no_grad():
        seen[-1].zero_()
    got = torch.autograd.grad(out.sum(), list(net.parameters()))
    assert all(map(torch.equal, got, expected))


# -- how plans and others use it


def test_what_another_thread_runs_is_not_noted(new_tape: Any) -> None:

    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = drawn(0)
    with OnTape(net, list(net), new_tape).recording() as tape:
        net(x)
        before = tape.noted
        other = threading.Thread(target=net, args=(x,))
        other.start()
        other.join()
        with torch._C._DisableTorchDispatch():
            x + 1
        assert tape.noted == before > 0


def test_backwards_in_other_threads(new_tape: Any) -> None:

    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(3)])
    expected = torch.autograd.grad(net(drawn(0)).sum(), list(net.parameters()))
    run, got = OnTape(net, list(net), new_tape), {}
    outs = {n: run(drawn(0)).sum() for n in range(4)}
    shared = outs[0]

    def backward(n: int) -> None:
        out = shared if n < 2 else outs[n]  # two of them at a time on one tape
        got[n] = torch.autograd.grad(out, list(net.parameters()), retain_graph=True)

    threads = [threading.Thread(target=backward, args=(n,)) for n in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, got[n], expected)) for n in outs)


def test_a_tape_within_a_tape(new_tape: Any) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(3)])
    expected = torch.autograd.grad(blocks(drawn(0)).sum(), list(blocks.parameters()))
    inner = OnTape(blocks[1], [], new_tape)
    outer = OnTape(nn.Sequential(blocks[0], inner, blocks[2]), [], new_tape)
    out = outer(drawn(0))
    assert outer.tapes[0].noted > 2 * inner.tapes[0].noted > 0  # the outer one sees all
    got = torch.autograd.grad(out.sum(), list(blocks.parameters()))
    assert all(map(torch.equal, got, expected))


def test_what_was_overwritten_unseen_is_told_of(new_tape: Any) -> None:
    """It is in memory of NumPy's, and nothing has its old bytes."""
    x = torch.ones(4, requires_grad=True)
    with OnTape(nn.Identity(), [], new_tape).recording() as tape:
        out = torch.sigmoid(x * 2).sum()
        tape.content_of(x).lose(None)
    with pytest.raises(RuntimeError, match="overwritten unseen"):
        out.backward()


def test_memory_of_numpy_that_is_gone_leaves_its_address_to_no_other_content(new_tape: Any) -> None:
    weight = torch.ones(4, requires_grad=True)
    with OnTape(nn.Identity(), [], new_tape).recording() as tape:
        for n in range(50):
            batch = torch.from_numpy(torch.full((4,), n + 0.5).numpy().copy())
            weight.detach() * batch
            address = batch.untyped_storage()._cdata
            del batch
            with torch._C._DisableTorchDispatch():
                several = [torch.full((4,), float(n)) for _ in range(64)]
            for t in several:
                if t.untyped_storage()._cdata == address:
                    assert torch.equal(torch.empty(0).set_(tape.content_of(t).held), t)


def test_the_kernel_is_built_wherever_it_can_be() -> None:

    headers = Path(torch.__file__).parent / "include" / "ATen" / "core" / "dispatch" / "Dispatcher.h"
    with_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if torch.__version__.startswith("2.13.") and headers.exists() and shutil.which("g++") and with_gil:
        assert Kernel is not None


look: Callable[[], Any] = bool
looked_at: list[Any] = []


@torch.library.custom_op("rotoff_tests::looking", mutates_args=())
def looking(x: torch.Tensor) -> torch.Tensor:
    looked_at.append(look())
    return x.clone()


looking.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("cuda.matmul.allow_fp16_accumulation", True),
        ("cuda.matmul.allow_fp16_reduced_precision_reduction", False),
        ("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
        ("cuda.matmul.fp32_precision", "tf32"),
        ("cudnn.conv.fp32_precision", "ieee"),
        ("cudnn.benchmark", True),
        ("cudnn.deterministic", True),
        ("mkldnn.enabled", False),
        ("cuda.preferred_blas_library", "ck"),
    ],
)
def test_a_replay_has_the_settings_of_the_first_run(
    name: str, other: Any, new_tape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    *path, last = name.split(".")
    where: Any = torch.backends
    for part in path:
        where = getattr(where, part)

    def choose(value: Any) -> None:
        setattr(where, last, value) if not callable(getattr(where, last)) else getattr(where, last)(value)

    def present() -> Any:
        return getattr(where, last)() if callable(getattr(where, last)) else getattr(where, last)

    monkeypatch.setitem(globals(), "look", present)
    looked_at.clear()
    before, x = present(), torch.ones(3, requires_grad=True)
    with OnTape(nn.Identity(), [], new_tape).recording():
        choose(other)
        try:
            y = looking(x).square()
        finally:
            choose(before)
    y.sum().backward()
    assert looked_at[0] == looked_at[1] != before == present()
    assert len(looked_at) == 2


@torch.library.custom_op("rotoff_tests::unlike", mutates_args=())
def unlike(x: torch.Tensor) -> torch.Tensor:
    looked_at.append(None)
    return x + len(looked_at)


unlike.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize("before", range(OFF_COURSE + 1))
def test_off_the_course_what_is_saved_is_never_made_again(before: int, new_tape: Any) -> None:
    """Wherever a stage of a step without a plan ends, such as between an operation and the save of its result."""
    x, tape = torch.ones(4, requires_grad=True), new_tape()
    with TapeStep(None, spill=Spill(x.device)).forward(tape):
        y = x * 1
        for _ in range(before):
            y = y + 1
        y = unlike(y)
        value, y = y.detach().clone(), y.square()
        for _ in range(2 * OFF_COURSE):
            y = y + 1
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * value)
