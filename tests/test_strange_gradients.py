"""Gradients that reach a stage permuted or expanded, which its kernels copy first: bytes that a gradient of ones would
not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocated import peak_bytes
from torch import nn

import rotoff
from rotoff.profile.memory.gradients import GradientPlace, charge


class Tanh(torch.autograd.Function):
    """Wants its gradient contiguous, as convolutions do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        copied = gradient.contiguous()  # beside the one given, which kernels hold as well
        return copied * (1 - y * y)


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tanh.apply(x)


class Total(nn.Module):
    """Over the tokens: its gradient is expanded, unless the values are multiplied first."""

    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        self.contiguous = contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.ones_like(x) if self.contiguous else x).sum(1)


class FreedEarly(nn.Module):
    """A sum lies like its first part, so that the gradient's layout is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x).mul(self.scale)


def wrapped(passing: int, contiguous: bool, x: torch.Tensor) -> rotoff.Checkpointable:
    model = nn.Sequential(nn.Linear(16, 64), Block(), *(FreedEarly() for _ in range(passing)), Total(contiguous))
    names = [str(n) for n in range(len(model))]
    return rotoff.Checkpointable(model, stages=names, check=True, forms=False).measure(x, repeats=1)


@pytest.mark.parametrize("passing", [0, 2])
def test_copies_of_such_gradients_are_charged(passing: int) -> None:
    x = torch.randn(4, 256, 16)
    plain, expanded = (wrapped(passing, contiguous, x).chain.stages[1] for contiguous in (True, False))
    assert expanded.backward_transient_bytes - plain.backward_transient_bytes == plain.output_bytes
    model = wrapped(passing, False, x)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.compute_sequence(model.keep_all_memory)
    assert peak_bytes(lambda: model(x).square().sum().backward()) <= model.get_expected_memory()
    model.close()


def test_they_stay_so_where_stages_hand_them_on() -> None:
    fresh, expanded = GradientPlace(1, 8, None), GradientPlace(1, 8, None, strange=True)
    keeps = GradientPlace(1, 8, None, passed_on=True)
    stages = [([keeps], [8]), ([fresh], [8]), ([keeps], [8]), ([expanded], [8])]
    assert [one.strange for one in charge(stages)] == [False, False, True, True, False]
