"""Models with skip connections, concatenated or added, far apart or near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import fresh
from torch import nn


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
