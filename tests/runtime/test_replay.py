"""What a replay sees and leaves: generators and autocast where stages use them in unusual ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import fresh, same, train
from planned_steps import compare, smallest, with_sequence
from torch import nn

import rotoff
from rotoff.core.sequence import FORWARDS


def run_twice(L: int) -> rotoff.Sequence:
    """Every stage but the last runs again right before its backward."""
    text = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        text += [f"F_all {i}", f"B {i}"]
    return rotoff.Sequence.from_text(text)


class Asks(nn.Module):
    """Asks a buffer for a number, which is then a part of what Python did."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * float(self.scale)


def test_a_buffer_that_no_call_of_a_replay_reads_may_change_before_the_backward() -> None:
    def gradients(model: nn.Sequential, run: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(2)
        loss = run(torch.randn(4, 16, requires_grad=True)).sum()
        model[1].scale.fill_(7.0)
        loss.backward()
        return [p.grad for p in model.parameters()]

    model = nn.Sequential(nn.Linear(16, 16), Asks(), nn.Linear(16, 4))
    again = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(4, 16, requires_grad=True))
    with_sequence(wrapped, run_twice(len(wrapped.chain)))
    assert same(gradients(model, wrapped), gradients(again, again))
    wrapped.close()


def test_hooks_that_draw_between_replays() -> None:
    """Noise added to gradients, as private training does: it must come from the generator as it stands outside."""

    def run(model: nn.Module, batch: object) -> list[torch.Tensor]:
        hooks = [p.register_hook(lambda g: g + torch.randn_like(g)) for p in model.parameters()]
        result = train(model, batch)
        for hook in hooks:
            hook.remove()
        return result

    compare(lambda: fresh("residual"), run)


@pytest.mark.parametrize("forward_casts", [True, False])
def test_a_backward_under_other_autocast_than_the_forward(forward_casts: bool) -> None:
    def step(model: nn.Module, batch: object) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_casts):
            loss = model(batch()).float().square().mean()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not forward_casts, cache_enabled=False):
            loss.backward()
            assert torch.is_autocast_enabled("cpu") is not forward_casts
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
        return [p.grad.clone() for p in model.parameters()]

    expected = step(*fresh("residual"))
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_casts):
        wrapped.measure(batch())
    assert same(step(with_sequence(wrapped, run_twice(len(wrapped.chain))), batch), expected)


class Unrolled(nn.Module):
    """The layers of a Sequential, called by a forward of its own, which is recorded."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("switch", ["frozen, then thawed", "frozen between", "eval between"])
@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_switched_between_a_forward_and_its_backward(recorded: bool, switch: str) -> None:
    """A GAN freezes its discriminator for the generator's loss and thaws it before the backward."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Tanh()) for _ in range(6)]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(32, 4))
    if recorded:
        model = Unrolled(model)
    begun_frozen = switch == "frozen, then thawed"

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(64, 32).requires_grad_()
        model.requires_grad_(not begun_frozen)
        loss = model(x).square().mean()
        if switch == "eval between":
            model.eval()
        else:
            model.requires_grad_(begun_frozen)
        loss.backward()
        flags = [p.requires_grad for p in model.parameters()] + [m.training for m in layers]
        assert set(flags) == ({False, True} if switch == "frozen between" else {True, switch != "eval between"})
        model.train()
        model.requires_grad_(not begun_frozen)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [x.grad.clone(), *grads, *(b.clone() for b in model.buffers())]

    state = copy.deepcopy(model.state_dict())
    expected = step(model) + step(model)
    model.load_state_dict(state)
    model.requires_grad_(not begun_frozen)
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(64, 32).requires_grad_())
    wrapped.compute_sequence(smallest(wrapped, "remat"), mode="remat")
    assert any(op.kind in FORWARDS for op in wrapped.sequence.ops[len(wrapped.chain) + 1 :])
    assert same(step(wrapped) + step(wrapped), expected)


class Doubled(torch.autograd.Function):
    """Changes what it is given, which no schema says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        seen.add_(x.detach().mean())
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x, self.seen).tanh()


class Whole(nn.Module):
    """Not a sequence, so that its forward is followed."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 1


@pytest.mark.parametrize("around", [nn.Identity, Whole])
def test_a_custom_function_that_changes_its_arguments(
    around: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Doubling(), nn.Linear(8, 8), Doubling(), nn.Linear(8, 8)
    )
    x = torch.randn(4, 8)
    model = Whole(layers) if around is Whole else layers
    plain_model = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model).measure(x)
    with_sequence(wrapped, run_twice(len(wrapped.chain)))
    for _ in range(2):
        for one in (wrapped, plain_model):
            one.zero_grad()
            one(x).square().sum().backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain_model.parameters()])
        assert same(list(model.buffers()), list(plain_model.buffers()))
    assert "another course" not in caplog.text
