"""A parameter in what the plan has brought of it: a tensor that calls are given in its place, whose gradient arrives
where it lies."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Arrival(Protocol):
    """Where the gradient of a parameter goes that lies on another device than compute."""

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Have it; returns what autograd is to add up where the parameter lies."""


class _Brought(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, content: torch.Tensor, gradient: Arrival | None) -> torch.Tensor:
        ctx.gradient = gradient
        return content.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return gradients[0] if ctx.gradient is None else ctx.gradient.take(gradients[0]), None, None


def bring(
    parameter: nn.Parameter,
    content: torch.Tensor,
    earlier: torch.Tensor | None = None,
    gradient: Arrival | None = None,
) -> torch.Tensor:
    """What stands for `parameter` in the forward of a step; `content`: its numbers, on the device.

    Args:
        earlier: what stood for it before, and is given the gradient in its place. gradient: what takes it, where the
            parameter lies on another device.
    """
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return content.detach()
    brought: torch.Tensor = (
        _Brought.apply(parameter, content, gradient) if earlier is None else _Brought.apply(earlier, content, None)
    )
    return brought
