"""Models whose forward skips layers by chance: one plan holds for all that they may do."""

from __future__ import annotations

import copy

import pytest
import torch
from allocated import peak_bytes
from models import Residual
from torch import nn

import rotoff


class LayerDrop(nn.Module):
    """Skips each layer with probability `chance`, as wav2vec 2.0 does."""

    def __init__(self, layers: int, chance: float, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.chance:
                continue
            x = layer(x)
        return self.head(x).mean(1)


def most(model: nn.Module, x: torch.Tensor, seeds: range) -> int:
    """The highest peak of steps that each begin from a seed."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        model(x).pow(2).sum().backward()

    return max(peak_bytes(lambda seed=seed: step(seed)) for seed in seeds)


def test_a_model_that_was_not_measured_comes_to_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, x = LayerDrop(12, 0.3), torch.randn(8, 64, 64)
    model = LayerDrop(12, 0.3)
    model.load_state_dict(plain.state_dict())
    probe = rotoff.Checkpointable(LayerDrop(12, 0.3)).measure(x)
    least = probe.min_mem_limit()
    wrapped = rotoff.Checkpointable(model).compute_sequence(least + (probe.keep_all_memory - least) // 3)

    def trained(run: nn.Module, own: nn.Module) -> list[torch.Tensor]:
        for seed in range(12):
            torch.manual_seed(seed)
            run(x).pow(2).sum().backward()
        return [p.grad for p in own.parameters() if p.grad is not None]

    assert all(map(torch.equal, trained(wrapped, model), trained(plain, plain)))
    caplog.clear()
    assert most(wrapped, x, range(12, 20)) <= wrapped.get_expected_memory() <= wrapped.mem_limit
    assert not caplog.records


def test_a_followed_step_that_keeps_everything_frees_what_nothing_saves() -> None:
    torch.manual_seed(0)
    model, x = LayerDrop(12, 0.0), torch.randn(8, 64, 64)
    model.layers[:9].requires_grad_(False)
    run = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    run.compute_sequence(run.keep_all_memory)
    assert most(run, x, range(1)) <= run.get_expected_memory() == run.keep_all_memory
    run.close()


def test_a_second_backward_holds_what_the_plan_charges() -> None:
    torch.manual_seed(0)
    plain, x = LayerDrop(6, 0.3), torch.randn(8, 64, 64)
    plain.layers[:3].requires_grad_(False)
    model = copy.deepcopy(plain)
    run = rotoff.Checkpointable(model, cache_directory=None, check=True)
    torch.manual_seed(1)
    run.measure(x)
    run.compute_sequence(run.keep_all_memory)
    for seed in range(3):
        for one in (plain, run):
            torch.manual_seed(seed)
            loss = one(x).pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is q.grad or torch.equal(p.grad, q.grad)
    run.close()


class Phases(nn.Module):
    """Goes one of two ways, as its caller says, in the middle of its own code."""

    phase = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        h = self.left(h).relu() if self.phase else self.right(h).tanh() + h
        return self.last(h).sin().mean(1)


def test_courses_that_take_turns_come_to_have_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Phases(), torch.randn(8, 64, 64)
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(int(0.8 * wrapped.keep_all_memory))
    for step in range(10):
        model.phase = step % 2
        wrapped(x).sum().backward()
    assert len(caplog.records) == 1, "one warning, for the first step on the other course"
    caplog.clear()
    for phase in (0, 1):
        model.phase = phase
        assert most(wrapped, x, range(1)) <= wrapped.get_expected_memory() <= wrapped.mem_limit
    assert not caplog.records


def test_courses_whose_plan_does_not_fit_as_one_keep_their_own() -> None:
    torch.manual_seed(0)
    model, x = Phases(), torch.randn(8, 64, 64)
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(wrapped.min_mem_limit())
    plain = [(phase, torch.autograd.grad(_loss(model, x, phase), model.first.weight)[0]) for phase in (0, 1)]
    for step in range(12):
        phase, gradient = plain[step % 2]
        model.zero_grad()
        _loss(wrapped, x, phase, model).backward()
        assert torch.equal(model.first.weight.grad, gradient)


def _loss(call: nn.Module, x: torch.Tensor, phase: int, model: nn.Module | None = None) -> torch.Tensor:
    (model or call).phase = phase
    return call(x).pow(2).sum()
