"""BatchNorm and LeakyReLU as one layer that saves only its output, which the backward inverts to find what it needs.

Source: Hascoet et al., *Reducing the Memory Cost of Training Convolutional Neural Networks by CPU Offloading* (JSEA
2019), section 4.2, after Rota Bulò, Porzi, Kontschieder, *In-Place Activated BatchNorm* (CVPR 2018), variant I. With z
= γ x̂ + β and y = leaky(z): z = leaky⁻¹(y), x̂ = (z − β) / γ, and BatchNorm's gradient needs x̂ and 1/σ alone.
PyTorch's pair keeps the input of BatchNorm and the output of the activation, and the latter is the next layer's input
anyway.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..errors import OptionError

_aten: Any = torch.ops.aten


class InvertibleBatchNormLeakyReLU(nn.modules.batchnorm._BatchNorm):
    """Replaces ``nn.BatchNorm1d`` to ``3d`` followed by ``nn.LeakyReLU``, and saves one tensor less for the backward.

    Parameters, buffers and state_dict are those of ``nn.BatchNorm``; outputs and gradients equal those of the pair up
    to rounding. The input must not be changed in place before its own backward, nor the output before this layer's.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of ``nn.BatchNorm2d``.
        negative_slope: of the activation; above 0, so that it can be inverted.
        least_weight: a weight γ closer to 0 is replaced by ± this value, so that dividing by it loses only some digits;
            its gradient is that of the replacement.

    Shape: input (N, C, ...), output the same.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        negative_slope: float = 0.01,
        least_weight: float = 1e-3,
    ) -> None:
        if not (isinstance(negative_slope, (int, float)) and math.isfinite(negative_slope) and negative_slope > 0):
            raise OptionError(f"negative_slope is {negative_slope!r}; give a number above 0, or use BatchNorm and ReLU")
        if not (isinstance(least_weight, (int, float)) and math.isfinite(least_weight) and least_weight > 0):
            raise OptionError(f"least_weight is {least_weight!r}; give a number above 0")
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.negative_slope = float(negative_slope)
        self.least_weight = float(least_weight)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of shape (N, C, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # a plain average over all batches
                factor = 1.0 / float(self.num_batches_tracked)
        batch = self.training or self.running_mean is None
        if batch and input.numel() == input.shape[1]:
            raise ValueError(f"expected more than one value for each channel in training, got {tuple(input.shape)}")
        keep = self.training and self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if keep or not batch else (None, None)
        made: torch.Tensor = _InvertibleFunction.apply(
            input, self.weight, self.bias, mean, var, batch, factor, self.eps, self.negative_slope, self.least_weight
        )
        return made

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, negative_slope={self.negative_slope}"


def _taken(weight: torch.Tensor, least: float) -> torch.Tensor:
    """Return γ with every value closer to 0 than `least` moved to ± `least`."""
    return torch.where(weight.abs() < least, torch.where(weight < 0, -least, least).to(weight.dtype), weight)


class _InvertibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        batch: bool,
        momentum: float,
        eps: float,
        slope: float,
        least: float,
    ) -> torch.Tensor:
        gamma = None if weight is None else _taken(weight, least)
        y, _, invstd = _aten.native_batch_norm(x, gamma, bias, running_mean, running_var, batch, momentum, eps)
        if not batch:
            assert running_var is not None
            invstd = torch.rsqrt(running_var + eps)
        torch.nn.functional.leaky_relu_(y, slope)
        ctx.save_for_backward(y, weight, bias, invstd)
        ctx.batch, ctx.eps, ctx.slope, ctx.least = batch, eps, slope, least
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weight, bias, invstd = ctx.saved_tensors
        shape = (1, -1, *(1,) * (y.dim() - 2))
        positive = y > 0
        dz = torch.where(positive, dy, dy * ctx.slope)
        x_hat = torch.where(positive, y, y / ctx.slope)
        gamma = None if weight is None else _taken(weight, ctx.least)
        if bias is not None:
            x_hat.sub_(bias.view(shape))
        if gamma is not None:
            x_hat.div_(gamma.view(shape))
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # BatchNorm's own backward on x̂, whose mean is 0 and whose variance 1; dx = dx̂ / σ.
        zero, one = torch.zeros_like(invstd), torch.ones_like(invstd)
        wants = [wants_x, wants_weight, wants_bias]
        dx, dweight, dbias = _aten.native_batch_norm_backward(
            dz.contiguous(), x_hat.contiguous(), gamma, zero, one - ctx.eps, zero, one, ctx.batch, ctx.eps, wants
        )
        if wants_x:
            dx.mul_(invstd.view(shape))
        gradients = (dx if wants_x else None, dweight if wants_weight else None, dbias if wants_bias else None)
        return (*gradients, None, None, None, None, None, None, None)
