"""Frozen weights that a tensor subclass wraps, as quantized ones: bits, bytes, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import in_file, peak_bytes
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.tensors.storage import stored

WIDTH, ROWS = 128, 64


class Int8(torch.Tensor):
    """Rows of 8-bit integers, each with a scale: of the kind of torchao's weight-only tensors."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, numbers.stride(), dtype=scale.dtype)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> Int8:
        return cls(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(func(args[0].numbers), func(args[0].scale))
        plain = [x.numbers * x.scale if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


class Named(nn.Parameter):
    """A parameter with more attributes, of the kind of bitsandbytes' 4-bit ones: operations see no difference."""


def own(linear: nn.Linear) -> nn.Linear:
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    numbers = (linear.weight.detach() / scale).round().to(torch.int8)
    linear.weight = nn.Parameter(Int8(numbers, scale), requires_grad=False)  # type: ignore[arg-type]
    return linear


def named(linear: nn.Linear) -> nn.Linear:
    linear.weight = Named(linear.weight.detach(), requires_grad=False)
    return linear


def torchaos(linear: nn.Linear) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="of torchao alone")
    of: nn.Module = nn.Sequential(linear)
    quantization.quantize_(of, quantization.Int8WeightOnlyConfig())
    return of[0]  # type: ignore[index]


class Adapted(nn.Module):
    """A frozen layer, and an adapter of low rank beside it."""

    def __init__(self, quantized: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.base = quantized(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False))
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


KINDS = {"wrapped": own, "torchao": torchaos, "named": named}


def drawn(kind: str) -> tuple[nn.Module, list[nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(KINDS[kind]) for _ in range(6)))
    return model, [p for p in model.parameters() if p.requires_grad]


def step(run: Any, optimizer: torch.optim.Optimizer, n: int) -> torch.Tensor:
    torch.manual_seed(n)
    loss = run(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(run: Any, trainable: list[nn.Parameter], optimizer: Any, steps: int = 4) -> list[torch.Tensor]:
    losses = [step(run, optimizer, n) for n in range(steps)]
    return [*losses, *(p.detach().clone() for p in trainable)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["remat", "offload"])
def test_a_step_within_its_smallest_limit_has_the_plain_bits(kind: str, mode: str) -> None:
    model, trainable = drawn(kind)
    expected = trained(model, trainable, adamw(trainable))
    model, trainable = drawn(kind)
    run = rotoff.Checkpointable(model, check=True).measure(torch.randn(ROWS, WIDTH))
    run.compute_sequence(run.min_mem_limit(mode), mode, refine=False)
    assert all(map(torch.equal, expected, trained(run, trainable, adamw(trainable))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("updates", ["after", "during"])
def test_frozen_weights_stream_in_and_never_out(kind: str, updates: str) -> None:
    model, trainable = drawn(kind)
    expected = trained(model, trainable, adamw(trainable))
    model, trainable = drawn(kind)
    optimizer = adamw(trainable)
    run = rotoff.Checkpointable(model)
    run.compute_sequence(device_limit="1 TiB", optimizer=optimizer, updates=updates)
    losses = [step(run, optimizer, 0)]
    with pytest.raises(rotoff.InfeasibleError) as refused:
        run.compute_sequence(device_limit=1, optimizer=optimizer, updates=updates)
    limit = refused.value.min_mem_limit
    run.compute_sequence(device_limit=limit, optimizer=optimizer, updates=updates, refine=False)
    losses += [step(run, optimizer, n) for n in range(1, 4)]
    assert all(map(torch.equal, expected, [*losses, *trainable]))
    frozen = [one for one in stored(model.parameters()) if not one.requires_grad]
    moved = {str(op) for op in run.sequence if op.of == "w" and not run.chain.group(op.stage).grad_bytes}
    assert any(one.startswith("prefetch") for one in moved) and not any(one.startswith("offload") for one in moved)

    def anew() -> None:
        away = in_file()
        for one in (*trainable, *frozen, *(t for state in optimizer.state.values() for t in state.values())):
            if not away(one):
                one.data = one.data.clone()

    measured = peak_bytes(lambda: [step(run, optimizer, n) for n in range(2)], before=anew)
    assert measured <= run.get_expected_memory() <= limit
    run.close()
