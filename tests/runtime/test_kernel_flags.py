"""Replays run the kernels of the first run, if flags that choose them are set around the forward or a part of it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import rotoff


def native() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


class Convolutions(nn.Module):
    def __init__(self, within: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            with native() if self.within and n % 2 else nullcontext():
                x = x + layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
@pytest.mark.grid
def test_gradients_and_bytes(within: bool, mode: str) -> None:
    model, x = Convolutions(within), torch.randn(2, 8, 12, 12)
    plain = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model, cache_directory=None)

    def step(one: nn.Module) -> None:
        with nullcontext() if within else native():
            loss = one(x)
        loss.backward()

    with nullcontext() if within else native():
        limit = wrapped.measure(x).min_mem_limit(mode)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(limit, mode=mode)
    for _ in range(3):  # the first step measures
        step(plain)
        step(wrapped)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert peak_bytes(lambda: step(wrapped)) <= wrapped.get_expected_memory() <= limit
    wrapped.close()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            for layer in self.layers:
                q, k, v = layer(x).view(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4)
                x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 24, 16)
        return x.square().mean()


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
def test_attention_kernels_that_the_model_chooses_are_measured(mode: str) -> None:
    """The fused kernel saves no matrix of scores."""
    model, x = Attention(), torch.randn(2, 24, 16)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for limit in (wrapped.min_mem_limit(mode), wrapped.keep_all_memory):
        wrapped.compute_sequence(limit, mode=mode)
        assert peak_bytes(lambda: wrapped(x).backward()) <= wrapped.get_expected_memory() <= limit
    wrapped.close()


def test_a_step_under_other_flags_has_a_plan_of_its_own() -> None:
    model, x = Convolutions(within=False), torch.randn(2, 8, 12, 12)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    with native():
        most = wrapped.measure(x).min_mem_limit("remat")
    wrapped.measure(x).compute_sequence(most, mode="remat")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with native():
        loss = wrapped(x)
    loss.backward()
    with native():
        assert peak_bytes(lambda: wrapped(x).backward()) <= wrapped.get_expected_memory() <= most
    wrapped.close()
