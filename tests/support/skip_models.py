"""Models with skip connections, concatenated or added, far apart or near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Does, fresh
from torch import nn


def convolutions(*widths: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Conv2d(width, 4, 3, padding=1) for width in widths)


def unet(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Features that are used again far from where they are made, one of them changed in place by nobody."""
    features = []
    for layer in net.down:
        features.append(x := torch.tanh(layer(x)))
    for layer in net.up:
        x = torch.tanh(layer(torch.cat([x, features.pop()], dim=1)))
    return x


def concatenates(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Its gradients wait in parts of a larger one, so that copying them is one of the choices."""
    for layer in net.layers:
        x = torch.cat([x, torch.relu(layer(x))], dim=1)
    return x


def dropping() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(6)]
    return nn.Sequential(*blocks), lambda: torch.randn(64, 32)


OTHERS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {
    "unet": lambda: (
        Does(unet, down=convolutions(4, 4, 4, 4), up=convolutions(8, 8, 8, 8)),
        lambda: torch.randn(2, 4, 16, 16),
    ),
    "concatenates": lambda: (
        Does(concatenates, layers=convolutions(4, 8, 12, 16, 20)),
        lambda: torch.randn(2, 4, 16, 16),
    ),
    "dropping": dropping,
}


def made(name: str) -> tuple[nn.Module, Callable[[], Any]]:
    torch.manual_seed(0)
    return OTHERS[name]() if name in OTHERS else fresh(name)
