"""Images whose numbers lie contiguously or channels last, by turns: no step holds more than predicted."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from allocated import peak_bytes
from torch import nn
from torch.nn import functional as F

import rotoff

CHANNELS = 8
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sine": torch.sin,
    "gelu": F.gelu,
    "silu": F.silu,
    "softmax": lambda x: x.softmax(1),
    "permuted": lambda x: x.transpose(2, 3).sin(),
    "less the mean": lambda x: x - x.mean(1, keepdim=True),
    "and the sum": lambda x: x + x.sum((2, 3), keepdim=True),
    "rolled": lambda x: x.roll(1, 1),
    "flipped": lambda x: x.flip(1),
    "scaled": lambda x: x * 2.0,
    "halves": lambda x: torch.cat([x.chunk(2, 1)[1].sin(), x.chunk(2, 1)[0]], 1),
    "gated": lambda x: torch.cat([x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), x.chunk(2, 1)[1]], 1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "smoothed": lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "rows": lambda: nn.Linear(16, 16),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
}


class Images(nn.Module):
    """Nine layers, a value that skips some of them and is added or concatenated, and a loss."""

    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.names = [drawn.choice([*PLAIN, *MODULES]) for _ in range(9)]
        self.layers = nn.ModuleList(MODULES[name]() if name in MODULES else nn.Identity() for name in self.names)
        self.leaves, self.comes = sorted(drawn.sample(range(9), 2))
        self.joins = drawn.choice(["concatenated", "added", "not"])
        self.merge = nn.Conv2d(2 * CHANNELS, CHANNELS, 1) if self.joins == "concatenated" else None
        self.last = nn.Conv2d(CHANNELS, 2, 1)
        self.turned = drawn.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = skip = self.first(x)
        for n, (name, layer) in enumerate(zip(self.names, self.layers, strict=True)):
            skip = y if n == self.leaves else skip
            y = PLAIN[name](y) if name in PLAIN else layer(y)
            if n == self.comes and self.merge is not None:
                y = self.merge(torch.cat([skip, y], 1).sin())
            elif n == self.comes and self.joins == "added":
                y = y + skip
        y = self.last(y)
        return (y.transpose(0, 1) * 1.0).sum() if self.turned else y.square().mean()


ALWAYS = {23, 44, *range(0, 80, 40)}  # two that held more than predicted, and others


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in range(80)])
def test_step_holds_at_most_predicted_bytes(seed: int) -> None:
    drawn = random.Random(seed)
    model, x = Images(drawn), torch.randn(4, 3, 16, 16)
    if drawn.random() < 0.3:
        x = x.to(memory_format=torch.channels_last)
    options = {"stages": drawn.choice([5, 8, 12]), "forms": drawn.random() < 0.5}
    wrapped = rotoff.Checkpointable(model, cache_directory=None, **options).measure(x)
    for mode in ("remat", "offload", "joint"):
        least, most = wrapped.min_mem_limit(mode), wrapped.keep_all_memory
        for share in (0.0, 0.3, 0.7, 1.0):
            wrapped.compute_sequence(int(least + share * (most - least)), mode=mode, refine=False)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            measured = peak_bytes(lambda: wrapped(x).backward())
            assert measured <= wrapped.get_expected_memory() <= wrapped.mem_limit, (model.names, mode, share)
    wrapped.close()


@pytest.mark.parametrize("mode", ["remat", "joint"])
def test_expanded_loss_gradient_keeps_predicted_bytes(mode: str) -> None:
    """As a sum does: kernels then copy what lies channels last, the indices of pooling among it."""
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.SiLU(), nn.MaxPool2d(3, 1, 1)]
    model = nn.Sequential(*copy.deepcopy(layers), *layers).to(memory_format=torch.channels_last)
    x = torch.randn(2, CHANNELS, 16, 16).to(memory_format=torch.channels_last)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    least, most = wrapped.min_mem_limit(mode), wrapped.keep_all_memory
    gradient = torch.ones(()).expand_as(x)
    for limit in (least, (least + most) // 2, most):
        wrapped.compute_sequence(limit, mode=mode, refine=False)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            assert peak_bytes(lambda: wrapped(x).backward(gradient)) <= wrapped.get_expected_memory() <= limit
    wrapped.close()
