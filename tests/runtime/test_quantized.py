"""Frozen weights that a tensor subclass wraps, as quantized ones: bits, bytes, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import in_file, peak_bytes
from models import Does
from quantized import own
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.tensors.storage import stored

WIDTH, ROWS = 128, 64


class Named(nn.Parameter):
    """A parameter with more attributes, of the kind of bitsandbytes' 4-bit ones: operations see no difference."""


def named(linear: nn.Linear) -> nn.Linear:
    linear.weight = Named(linear.weight.detach(), requires_grad=False)
    return linear


def torchaos(linear: nn.Linear) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="of torchao alone")
    of: nn.Module = nn.Sequential(linear)
    quantization.quantize_(of, quantization.Int8WeightOnlyConfig())
    return of[0]  # type: ignore[index]


def adapted(quantized: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """A frozen layer, and an adapter of low rank beside it."""
    base = quantized(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False))
    down, up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
    return Does(lambda net, x: x + F.gelu(net.base(x) + net.up(net.down(x))), base=base, down=down, up=up)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


KINDS = {"wrapped": own, "torchao": torchaos, "named": named}


def drawn(kind: str) -> tuple[nn.Module, list[nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(adapted(KINDS[kind]) for _ in range(6)))
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
