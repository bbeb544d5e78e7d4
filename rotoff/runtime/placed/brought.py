"""A parameter in what the plan has brought of it: a tensor that calls are given in its place, whose gradient arrives
where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Brought(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        return content.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def bring(parameter: nn.Parameter, content: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
    """What stands for `parameter` in the forward of a step; `content`: its numbers, on the device. earlier: what stood
    for it before, and is given the gradient in its place."""
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return content.detach()
    brought: torch.Tensor = _Brought.apply(parameter if earlier is None else earlier, content)
    return brought
