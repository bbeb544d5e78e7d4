"""What is dropped and made again from a tape is what it was: on the tables of models that change between steps, with
everything dropped, and on what a tape cannot see."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
import state_models  # noqa: F401
import torch
from on_tape import OnTape, verdict
from step_by_step import Row
from torch import nn
from torch.nn import functional as F
from trunks import TABLE, Block, Trunk, drawn

from rotoff.tape.tape import Tape
from rotoff.tape.verify import Known, Verified


def cases() -> list[Any]:
    """Every fourth row; slowly, all."""
    return [pytest.param(row, id=row.name, marks=[pytest.mark.slow] if n % 4 else []) for n, row in enumerate(TABLE)]


@pytest.mark.parametrize("row", cases())
def test_everything_dropped_is_made_again(row: Row) -> None:
    said = verdict(row)
    assert said == "equal" or (row.may_refuse is not None and "error: RuntimeError" in said), said


@pytest.mark.parametrize("row", cases())
def test_everything_dropped_is_made_again_once_verified(row: Row) -> None:
    known = Known()
    said = verdict(row, lambda: Verified(known))
    assert said == "equal" or (row.may_refuse is not None and "error: RuntimeError" in said), said
    assert not known.held and not known.overwritten  # nothing in the table is unseen


# -- what the tape does not see


class OfNumPy(torch.autograd.Function):
    """Computes in NumPy: its result is nothing that PyTorch made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(x.detach().numpy() * 2.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * 2 + 0 * y


class Foreign(torch.autograd.Function):
    """Fills by ctypes a tensor that PyTorch made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        source = (x.detach() * 2).contiguous()
        ctypes.memmove(y.data_ptr(), source.data_ptr(), y.nbytes)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * 2 * torch.where(y > 1e30, 0.0, 1.0)


class WritesItsInput(torch.autograd.Function):
    """Changes by NumPy what another stage made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        x.detach().numpy()[:, :4] *= 0.5
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 + x


calls = 0


class Counts(torch.autograd.Function):
    """Another result in each call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(x.detach().numpy().copy())
        global calls
        calls += 1
        ctx.save_for_backward(y)
        return x * (1 + 0.1 * calls)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return g * y


def trunk_with(act: Callable[[torch.Tensor], torch.Tensor]) -> type[Trunk]:
    class With(Trunk):
        def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.tanh(act(torch.sin(x))) if n % 2 else x

    return With


class Borders(Trunk):
    """The function runs at the start of a block, on what the block before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_pre_hook(lambda module, args: (WritesItsInput.apply(args[0]),))


def gradients(run: nn.Module, net: nn.Module, n: int) -> list[torch.Tensor]:
    net.zero_grad()
    x = drawn(n).requires_grad_()
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "make",
    [*(trunk_with(function.apply) for function in (OfNumPy, Foreign, WritesItsInput, Counts)), Borders],
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
    net, known = trunk_with(Foreign.apply)(), Known()
    for n in range(2):
        gradients(OnTape(net, list(net.blocks), lambda: Verified(known)), net, n)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "aten.empty_like.default" in told[0]


def test_a_stage_that_is_not_known_is_kept() -> None:
    """On a plain tape, which does not verify, nothing is made again that was not verified before."""
    torch.manual_seed(0)
    net, known = trunk_with(Foreign.apply)(), Known()
    for n, new_tape in enumerate([Tape, Verified, Tape]):
        expected = gradients(net, net, n)
        run = OnTape(net, list(net.blocks), lambda new_tape=new_tape: new_tape(known))
        assert all(map(torch.equal, gradients(run, net, n), expected))
        assert bool(run.tapes[0].replayed) is (n > 0)


# -- what it costs


class Counted(Tape):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def saved(self, slot: Any, storage: Any) -> None:
        self.peak += storage.nbytes()


def test_dropped_bytes_are_gone_and_only_what_is_needed_runs_again() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(6)])
    run = OnTape(blocks, list(blocks))
    out = run(drawn(0).requires_grad_())
    (tape,) = run.tapes
    noted = len(tape.operations)
    slots = [slot for stage in tape.slots for slot in tape.live(stage)]
    alive = [slot for slot in slots if slot.reference is not None and slot.reference.content.alive()]
    # a residual stream is alive nowhere once the next block has its own; all but the result is gone
    assert len(alive) <= 1 and len(slots) > 20
    del slots, alive
    out.sum().backward()
    assert 0 < tape.replayed < noted * 7 / 2  # each block from the batch on, but not its last operation
    assert not [slot for stage in tape.slots for slot in tape.live(stage)]


def test_a_graph_that_is_dropped_frees_the_tape() -> None:
    import gc
    import weakref

    blocks = nn.Sequential(*[Block() for _ in range(3)])
    run = OnTape(blocks, list(blocks))
    out = run(drawn(0))
    tape = weakref.ref(run.tapes.pop())
    gc.disable()
    try:
        del out
        assert tape() is None
    finally:
        gc.enable()


def test_a_gradient_of_a_gradient() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
    found = []
    for run in (blocks, OnTape(blocks, list(blocks))):
        x = drawn(0).requires_grad_()
        (g,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *list(blocks.parameters())[:-1]]))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("change", ["add_", "data"])
def test_what_was_changed_in_place_raises_as_in_pytorch(change: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    out = OnTape(net, list(net))(drawn(0))
    with torch.no_grad():
        (net[2].weight if change == "add_" else net[0].weight).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_held_contents_that_others_hold_are_compared() -> None:
    """The caller changes in place what nothing saves and a plan holds: it is made again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Identity(), nn.Tanh(), nn.Linear(16, 16))
    seen: list[torch.Tensor] = []
    net[0].register_forward_hook(lambda m, a, out: seen.append(out))
    expected = torch.autograd.grad(net(drawn(0)).sum(), list(net.parameters()))
    run = OnTape(net, [net[0]])
    with run.recording() as tape:
        out = net(drawn(0))
        tape.content_of(seen[-1]).hold(seen[-1].untyped_storage())
    with torch.no_grad():
        seen[-1].zero_()
    got = torch.autograd.grad(out.sum(), list(net.parameters()))
    assert all(map(torch.equal, got, expected))


def test_checkpoint_within_and_modes_around() -> None:
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(3)])

    class Checkpointed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.dropout(x, 0.3)

    net, found = Checkpointed(), []
    for run in (net, OnTape(net, [blocks[1]])):
        torch.manual_seed(1)
        with FlopCounterMode(display=False):
            out = run(drawn(0).requires_grad_())
            found.append(torch.autograd.grad(out.sum(), list(blocks.parameters())))
    assert all(map(torch.equal, *found))
