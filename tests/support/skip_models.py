"""Models with skip connections, concatenated or added, far apart or near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import fresh
from torch import nn


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 8), self.block(8, 16), self.block(16, 32)])
        self.up = nn.ModuleList([self.block(48, 16), self.block(24, 8)])

    @staticmethod
    def block(narrow: int, wide: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = nn.functional.interpolate(self.down[2](nn.functional.max_pool2d(second, 2)), scale_factor=2)
        x = nn.functional.interpolate(self.up[0](torch.cat([x, second], 1)), scale_factor=2)
        return self.up[1](torch.cat([x, first], 1))


class Gated(nn.Module):
    """Adds its first features at every depth."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x) + first * x)
        return x


class Skipping(nn.Module):
    """A skip connection over several convolutions, and a concatenation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.inner = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = y = self.first(x).sin()
        for layer in self.inner:
            y = layer(y).sin()
        return self.last(torch.cat([skip, y], 1).sin()).square().mean()


class TanhUNet(nn.Module):
    """Features that are used again far from where they are made, one of them changed in place by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = []
        for layer in self.down:
            features.append(x := torch.tanh(layer(x)))
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, features.pop()], dim=1)))
        return x


class Concatenates(nn.Module):
    """Its gradients wait in parts of a larger one, so that copying them is one of the choices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 4 * n, 4, 3, padding=1) for n in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.relu(layer(x))], dim=1)
        return x


def dropping() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(6)]
    return nn.Sequential(*blocks), lambda: torch.randn(64, 32)


OTHERS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {
    "unet": lambda: (TanhUNet(), lambda: torch.randn(2, 4, 16, 16)),
    "concatenates": lambda: (Concatenates(), lambda: torch.randn(2, 4, 16, 16)),
    "dropping": dropping,
}


def made(name: str) -> tuple[nn.Module, Callable[[], Any]]:
    torch.manual_seed(0)
    return OTHERS[name]() if name in OTHERS else fresh(name)
