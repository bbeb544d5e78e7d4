"""Skip connections kept in place: found from one measurement, planned beside carrying, and run to the plain model's
bits."""

from __future__ import annotations

import pytest
import torch
from allocated import peak_bytes
from torch import nn
from torch.nn import functional as F

import rotoff


class UNet(nn.Module):
    """Three resolutions, batch norm and dropout on the way down."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in sizes[1:])
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.stem(x))
        skips = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            skips.append(x)
            x = F.dropout(F.gelu(norm(conv(F.max_pool2d(x, 2)))), 0.1)
        for conv, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = F.gelu(conv(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1)))
        return self.head(x)


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(self.norm(x)), self.key(memory), self.value(memory)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1)
        return x + self.down(F.gelu(self.up(x)))


class Translator(nn.Module):
    """All layers of the decoder read the encoder's output."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(20, width)
        self.encoder, self.decoder = (nn.ModuleList(Attend(width) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.words(x)
        for layer in self.encoder:
            memory = layer(memory, memory)
        y = self.words(x.flip(1))
        for layer in self.decoder:
            y = layer(y, memory)
        return y


# -- what is found


# -- what it costs


# -- how it runs


def measured_peak(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that one step allocates beside parameters' gradients, the batch, and what the caller makes of the
    output."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gradient = torch.ones_like(model(x))
    return peak_bytes(lambda: model(x).backward(gradient))


# -- what is planned


# Stages that end where blocks do, as in a larger model: between finer ones lie outputs that nobody saves, which is
# another matter.
@pytest.mark.parametrize(("name", "count", "share"), [("unet", 40, 1.1), ("translator", 10, 1.05)])
def test_keep_all_memory_is_close_to_plain_model(name: str, count: int, share: float) -> None:
    torch.manual_seed(0)
    model, x = (
        (UNet(8), torch.randn(8, 3, 64, 64)) if name == "unet" else (Translator(64), torch.randint(0, 20, (8, 64)))
    )
    wrapped = rotoff.Checkpointable(model, stages=count, cache_directory=None, forms=False).measure(x)
    real = measured_peak(model, x)
    carried = rotoff.simulate(wrapped.profile.chain, rotoff.solver.keep_all(wrapped.profile.chain)).peak_bytes
    assert real <= wrapped.keep_all_memory <= share * real
    assert wrapped.keep_all_memory < carried - wrapped.profile.chain.input_bytes
    for mode in ("remat", "joint"):
        limit = int(0.7 * wrapped.keep_all_memory)
        wrapped.compute_sequence(limit, mode=mode)
        assert measured_peak(wrapped, x) <= wrapped.get_expected_memory() <= limit
    wrapped.close()
