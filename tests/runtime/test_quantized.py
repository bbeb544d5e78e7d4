"""Frozen weights that a tensor subclass wraps, as quantized ones: bits, bytes, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from allocated import in_file, peak_bytes
from forced_plans import added_up, place, twins
from models import Does, same
from placed_loops import left, usual
from planned_steps import bits_and_bytes, drawn
from quantized import own
from torch import nn
from torch.nn import functional as F

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


KINDS = {"wrapped": own, "torchao": torchaos, "named": named}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(adapted(KINDS[kind]) for _ in range(6)))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_within_limits_have_the_plain_bits(kind: str) -> None:
    options = {"fresh": lambda: model_of(kind), "check": True}
    bits_and_bytes(model_of(kind), drawn(ROWS, WIDTH), ["remat", "offload"], **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("updates", ["after", "during"])
def test_frozen_weights_stream_in_and_never_out(kind: str, updates: str) -> None:
    net, (batch,) = model_of(kind), drawn(ROWS, WIDTH)()
    pairs = twins(net, batch, updates=updates, plan=place, copied=lambda _: model_of(kind))
    assert same(*left(pairs, usual, partial(torch.randn, ROWS, WIDTH), steps=4))
    model, run, (optimizer,) = pairs[1]
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = [one for one in stored(model.parameters()) if not one.requires_grad]
    moved = {str(op) for op in run.sequence if op.of == "w" and not run.chain.group(op.stage).grad_bytes}
    assert any(one.startswith("prefetch") for one in moved) and not any(one.startswith("offload") for one in moved)

    def anew() -> None:
        away = in_file()
        for one in (*trainable, *frozen, *(t for state in optimizer.state.values() for t in state.values())):
            if not away(one):
                one.data = one.data.clone()

    measured = peak_bytes(lambda: [added_up(run, [optimizer], torch.randn(ROWS, WIDTH)) for _ in "ab"], before=anew)
    assert measured <= run.get_expected_memory() <= run.mem_limit
    run.close()
