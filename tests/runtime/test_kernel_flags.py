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


class Noting(torch.autograd.Function):
    """Notes how precise the kernels are that it runs beside."""

    noted: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        Noting.noted.append(precisions())
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.saved_tensors[0]


def precisions() -> tuple[Any, ...]:
    cuda = torch.backends.cuda.matmul
    kinds = [torch._C._get_fp32_precision_getter(kind, "matmul") for kind in ("cuda", "mkldnn")]
    return *kinds, torch.backends.cudnn.conv.fp32_precision, cuda.allow_bf16_reduced_precision_reduction


def legacy() -> None:
    torch.set_float32_matmul_precision("high")


def fresh_api() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def of_cudnn() -> None:
    torch.backends.cudnn.allow_tf32 = False


def of_sums() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class Precise(nn.Module):
    """Each second layer, if `within`, runs as `chosen` has it."""

    def __init__(self, chosen: Any, within: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.chosen, self.within = chosen, within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            if self.within and n % 2:
                self.chosen()
            x = Noting.apply(layer(x).tanh())
            if self.within and n % 2:
                usual()
        return x.square().mean()


def usual() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
@pytest.mark.parametrize("chosen", [legacy, fresh_api, of_cudnn, of_sums])
def test_a_replay_is_as_precise_as_the_first_run(chosen: Any, within: bool) -> None:
    usual()
    before = precisions()
    x = torch.randn(4096, 16)
    wrapped = rotoff.Checkpointable(Precise(chosen, within), stages=6, forms=False, cache_directory=None)
    try:
        if not within:
            chosen()
        limit = wrapped.measure(x).min_mem_limit("remat")
        wrapped.compute_sequence(limit, mode="remat")
        for _ in range(3):
            if not within:
                chosen()
            Noting.noted.clear()
            loss = wrapped(x)
            first = len(Noting.noted)
            usual()
            loss.backward()
            assert len(Noting.noted) > first  # some layers ran again
            others = {noted for n, noted in enumerate(Noting.noted[:first]) if not within or n % 2}
            assert others != {before}
            assert {*Noting.noted[first:]} <= {*Noting.noted[:first]}
            assert within or {*Noting.noted} == others
            assert precisions() == before
    finally:
        usual()
    torch.backends.fp32_precision = "tf32"  # what nobody has set for itself still follows this
    assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    torch.backends.fp32_precision = "none"
    wrapped.close()
