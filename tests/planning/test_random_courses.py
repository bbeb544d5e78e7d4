"""Models whose forward skips layers by chance: one plan holds for all that they may do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import Does, Residual
from torch import nn

import rotoff


def run_some(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Skips each layer with probability `chance`, as wav2vec 2.0 does."""
    for layer in net.layers:
        if torch.rand([]) >= net.chance:
            x = layer(x)
    return net.head(x).mean(1)


def layer_drop(layers: int, chance: float) -> Any:
    parts = nn.ModuleList(Residual(64) for _ in range(layers))
    return Does(run_some, layers=parts, head=nn.Linear(64, 10), chance=chance)


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
    plain, x = layer_drop(12, 0.3), torch.randn(8, 64, 64)
    model = layer_drop(12, 0.3)
    model.load_state_dict(plain.state_dict())
    probe = rotoff.Checkpointable(layer_drop(12, 0.3)).measure(x)
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
    model, x = layer_drop(12, 0.0), torch.randn(8, 64, 64)
    model.layers[:9].requires_grad_(False)
    run = rotoff.Checkpointable(model).measure(x)
    run.compute_sequence(run.keep_all_memory)
    assert most(run, x, range(1)) <= run.get_expected_memory() == run.keep_all_memory
    run.close()


def test_a_second_backward_holds_what_the_plan_charges() -> None:
    torch.manual_seed(0)
    plain, x = layer_drop(6, 0.3), torch.randn(8, 64, 64)
    plain.layers[:3].requires_grad_(False)
    model = copy.deepcopy(plain)
    run = rotoff.Checkpointable(model, check=True)
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


def one_of_two(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Goes one of two ways, as its caller says, in the middle of its own code."""
    h = net.first(x).relu()
    h = net.left(h).relu() if net.phase else net.right(h).tanh() + h
    return net.last(h).sin().mean(1)


def phases() -> Any:
    return Does(one_of_two, phase=0, **{name: nn.Linear(64, 64) for name in ("first", "left", "right", "last")})


def test_courses_that_take_turns_come_to_have_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = phases(), torch.randn(8, 64, 64)
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
    model, x = phases(), torch.randn(8, 64, 64)
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
