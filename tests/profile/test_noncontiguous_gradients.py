"""Gradients that reach a stage permuted or expanded, which its kernels copy first: bytes that a gradient of ones would
not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocated import peak_bytes
from torch import nn

import rotoff
from rotoff.profile.memory.gradients import GradientPlace, Layout, charge
from rotoff.profile.timing.harness import permuted


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
    return rotoff.Checkpointable(model, stages=names, check=True, forms=False).measure(x)


class Experts(nn.Module):
    """Hands on values that lie by expert; what mixes them gives a gradient that lies by token, with experts inside."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Parameter(0.1 * torch.randn(experts, width, 2 * width))
        self.second = nn.Parameter(0.1 * torch.randn(experts, 2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(torch.einsum("btd,edf->betf", x, self.first))
        return torch.einsum("betf,efd->betd", hidden, self.second)


class Mixed(nn.Module):
    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.rand(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.shares.softmax(0).expand(x.shape[0], x.shape[2], -1)
        return torch.einsum("betd,bte->btd", x, shares).tanh()


def test_permuted_values_are_measured_with_noncontiguous_gradients() -> None:
    x = torch.randn(4, 32, 32)
    model = nn.Sequential(nn.Linear(32, 32), Experts(32), Mixed(32), nn.Linear(32, 32), Experts(32), Mixed(32))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    planned = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    for limit in (planned.keep_all_memory, planned.min_mem_limit("remat")):
        planned.compute_sequence(limit, mode="remat")
        result = planned(x)
        gradient = torch.randn_like(result)
        result.backward(gradient)
        peaks = peak_bytes(lambda gradient=gradient: planned(x).backward(gradient))
        assert peaks <= planned.get_expected_memory()


@pytest.mark.parametrize("passing", [0, 2])
def test_copies_of_noncontiguous_gradients_are_charged(passing: int) -> None:
    x = torch.randn(4, 256, 16)
    plain, expanded = (wrapped(passing, contiguous, x).chain.stages[1] for contiguous in (True, False))
    assert expanded.backward_transient_bytes - plain.backward_transient_bytes == plain.output_bytes
    model = wrapped(passing, False, x)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.compute_sequence(model.keep_all_memory)
    assert peak_bytes(lambda: model(x).square().sum().backward()) <= model.get_expected_memory()
    model.close()


class Tokens(torch.autograd.Function):
    """A sum over the tokens, whose gradient is expanded for many tokens alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        expanded = gradient.unsqueeze(1).expand(ctx.shape)
        return expanded if ctx.shape[1] > 100 else expanded.contiguous()


class TotalOfTokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tokens.apply(x)


def test_a_layout_that_other_sizes_do_not_have_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(
        "rotoff.profile.stage_bytes.permuted", lambda outputs: [tried.append(1), *permuted(outputs)][1:]
    )
    parts = nn.Linear(16, 64), Block(), *(FreedEarly() for _ in range(12)), TotalOfTokens()
    names = [str(n) for n in range(len(parts))]

    def planned(*tokens: int) -> rotoff.Checkpointable:
        model = rotoff.Checkpointable(nn.Sequential(*parts), stages=names, check=True, cache_directory=None)
        model.compute_sequence(limit)
        for count in tokens:
            tried.clear()
            model(torch.randn(4, count, 16)).square().sum().backward()
        return model

    limit = 1 << 30
    limit = planned(128).min_mem_limit("joint")
    known, fresh = planned(64, 128), planned(128)
    bytes_of = [[one.backward_transient_bytes for one in model.chain.stages] for model in (known, fresh)]
    assert bytes_of[0] == bytes_of[1]
    alike = planned(64, 96)
    assert not tried
    for model in (known, alike):
        assert model.chain.meta["times"] == "interpolated between those measured at other sizes"
        assert [one.measured for one in model.plans()] == [True, True]


class Joined(nn.Module):
    """Concatenates channels, so that the gradient of `x` is a part of a larger one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.ones_like(x)), 1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_copies_of_gradients_with_gaps_are_charged(memory_format: torch.memory_format) -> None:
    """The backward of an interpolation copies a gradient that has gaps, and none that lies in another order."""
    x = torch.randn(2, 8, 8, 8).to(memory_format=memory_format)

    def backward_bytes(channels: int, *between: nn.Module) -> int:
        up = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Upsample(scale_factor=4, mode="bilinear"))
        last = nn.Sequential(*between, nn.Conv2d(channels, 4, 1), nn.Tanh())
        model = nn.Sequential(up, last).to(memory_format=memory_format)
        planned = rotoff.Checkpointable(model, stages=["0", "1"], forms=False, cache_directory=None)
        return planned.measure(x).chain.stages[0].backward_transient_bytes

    assert backward_bytes(32, Joined()) > backward_bytes(16)


def test_passed_on_gradients_keep_their_layout() -> None:
    fresh, expanded = GradientPlace(1, 8, None), GradientPlace(1, 8, None, Layout.ORDER)
    keeps = GradientPlace(1, 8, None, from_permuted=Layout.ORDER)
    stages = [([keeps], [8]), ([fresh], [8]), ([keeps], [8]), ([expanded], [8])]
    contiguous, strange = Layout.ALIKE, Layout.ORDER
    assert [one.layout for one in charge(stages)] == [contiguous, contiguous, strange, strange, contiguous]


def test_partial_gradient_is_noncontiguous_until_a_kernel_copies_it() -> None:
    part = GradientPlace(1, 8, None, Layout.GAPS)
    handed_on = GradientPlace(2, 8, 0, from_permuted=Layout.ORDER)  # it is the gradient given
    made = GradientPlace(3, 8, None, from_permuted=Layout.ORDER)
    stages = [([made], [8]), ([made], [8]), ([handed_on], [8]), ([part], [8])]
    assert [one.layout for one in charge(stages)] == [0, 0, Layout.GAPS, Layout.GAPS, 0]


def test_unread_gradient_costs_no_copy() -> None:
    made, part = GradientPlace(3, 8, None, from_permuted=Layout.ORDER), GradientPlace(1, 16, None, Layout.GAPS)
    skip = GradientPlace(5, 16, 0, from_permuted=Layout.ORDER, untouched=True)
    stages = [([made], [8]), ([skip, made], [8, 8]), ([part, made], [8, 8])]
    assert [one.layout for one in charge(stages)] == [0, Layout.GAPS, 0, 0]


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (torch.ones(2, 3), Layout.ALIKE),
        (torch.ones(2, 6)[:, :3], Layout.GAPS),
        (torch.ones(3, 2).t(), Layout.ORDER),
        (torch.ones(1).expand(3), Layout.ORDER),
        (torch.ones(6, 2, 2).narrow(0, 1, 3), Layout.ALIKE),
        (torch.ones(2, 6, 2).narrow(1, 1, 1), Layout.GAPS),
    ],
)
def test_layout_of_gradients(tensor: torch.Tensor, layout: Layout) -> None:
    assert Layout.of(tensor, torch.empty(tensor.shape)) is layout
    # what a kernel that works number by number makes of it is contiguous, unless the order is another
    assert (tensor * torch.ones(tensor.shape)).is_contiguous() or layout is Layout.ORDER
