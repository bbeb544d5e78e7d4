"""Models whose forward skips layers by chance: one plan holds for all that they may do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Does, Residual
from planned_steps import Beside
from torch import nn


def run_some(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Skips each layer with probability `chance`, as wav2vec 2.0 does."""
    for layer in net.layers:
        if torch.rand([]) >= net.chance:
            x = layer(x)
    return net.head(x).mean(1)


def layer_drop(layers: int, chance: float) -> Any:
    parts = nn.ModuleList(Residual(64) for _ in range(layers))
    return Does(run_some, layers=parts, head=nn.Linear(64, 10), chance=chance)


def test_a_model_that_was_not_measured_comes_to_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, x = layer_drop(12, 0.3), torch.randn(8, 64, 64)
    limit = Beside(layer_drop(12, 0.3), sample=(x,)).within("joint", 1 / 3).limit
    beside = Beside(plain, limit)
    for _ in range(12):
        beside.step(x)
    caplog.clear()
    for _ in range(8):
        beside.check(x)
    assert not caplog.records


def test_a_followed_step_that_keeps_everything_frees_what_nothing_saves() -> None:
    torch.manual_seed(0)
    model, x = layer_drop(12, 0.0), torch.randn(8, 64, 64)
    model.layers[:9].requires_grad_(False)
    beside = Beside(model, sample=(x,)).within("joint", 1.0)
    beside.check(x)
    assert beside.planned.get_expected_memory() == beside.planned.keep_all_memory
    beside.planned.close()


def test_a_second_backward_holds_what_the_plan_charges() -> None:
    torch.manual_seed(0)
    plain, x = layer_drop(6, 0.3), torch.randn(8, 64, 64)
    plain.layers[:3].requires_grad_(False)
    beside = Beside(plain, sample=(x,), check=True, backward=twice).within("joint", 1.0)
    for _ in range(3):
        beside.step(x)
    beside.planned.close()


def twice(output: torch.Tensor, _: Any) -> None:
    loss = output.pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def one_of_two(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Goes one of two ways, as its caller says, in the middle of its own code."""
    h = net.first(x).relu()
    h = net.left(h).relu() if net.phase else net.right(h).tanh() + h
    return net.last(h).sin().mean(1)


def phases(share: float, x: torch.Tensor) -> Beside:
    torch.manual_seed(0)
    parts = {name: nn.Linear(64, 64) for name in ("first", "left", "right", "last")}
    return Beside(Does(one_of_two, phase=0, **parts), sample=(x,)).within("joint", share)


def in_phase(beside: Beside, phase: int) -> Beside:
    beside.plain.phase = beside.model.phase = phase
    return beside


def test_courses_that_take_turns_come_to_have_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 64, 64)
    beside = phases(0.29, x)
    for step in range(10):
        in_phase(beside, step % 2).step(x)
    assert len(caplog.records) == 1, "one warning, for the first step on the other course"
    caplog.clear()
    for phase in (0, 1):
        in_phase(beside, phase).check(x)
    assert not caplog.records


def test_courses_whose_plan_does_not_fit_as_one_keep_their_own() -> None:
    x = torch.randn(8, 64, 64)
    beside = phases(0.0, x)
    for step in range(12):
        in_phase(beside, step % 2).step(x)
