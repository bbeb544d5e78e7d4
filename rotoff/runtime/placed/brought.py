"""Stand-ins for placed parameters: calls get a tensor on the device, whose gradient goes to the parameter."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ...tensors.grad_mode import recording


class Arrival(Protocol):
    """Receives the gradient of a parameter that lies on another device than compute."""

    def take(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take `gradient`; returns what autograd has to accumulate in the parameter itself, or None."""


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
    """Return the tensor that stands for `parameter` in the forward of a step.

    Args:
        content: the parameter's numbers on the device. earlier: its stand-in from before, to which the gradient of
            this one flows. gradient: receives the gradient if the parameter lies on another device.
    """
    if not parameter.requires_grad:
        return content.detach()
    with recording():  # later calls may need its gradient, whether or not this one does
        if earlier is not None:
            parameter, gradient = earlier, None  # type: ignore[assignment]
        brought: torch.Tensor = _Brought.apply(parameter, content, gradient)
        return brought
