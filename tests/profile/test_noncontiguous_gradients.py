"""Gradients that reach a stage permuted or expanded, which its kernels copy first: bytes that a gradient of ones would
not show."""

from __future__ import annotations

import torch
from allocated import peak_bytes
from torch import nn

import rotoff


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
