"""BatchNorm and LeakyReLU as one layer that saves only its output, which the backward inverts to find what it needs.

Source: Hascoet et al., *Reducing the Memory Cost of Training Convolutional Neural Networks by CPU Offloading* (JSEA
2019), section 4.2, after Rota Bulò, Porzi, Kontschieder, *In-Place Activated BatchNorm* (CVPR 2018), variant I. With z
= γ x̂ + β and y = leaky(z): z = leaky⁻¹(y), x̂ = (z − β) / γ, and BatchNorm's gradient needs x̂ and 1/σ alone.
PyTorch's pair keeps the input of BatchNorm and the output of the activation, and the latter is the next layer's input
anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

_aten: Any = torch.ops.aten


class InvertibleBatchNormLeakyReLU(nn.BatchNorm2d):
    """In training equals ``nn.BatchNorm2d`` followed by ``nn.LeakyReLU(slope)`` up to rounding, and saves one tensor
    less. No weight may be 0."""

    slope = 0.01

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        statistics = self.running_mean, self.running_var, self.momentum, self.eps, self.slope
        made: torch.Tensor = _Function.apply(input, self.weight, self.bias, *statistics)
        return made


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *statistics: Any) -> torch.Tensor:
        mean, var, momentum, ctx.eps, ctx.slope = statistics
        y, _, invstd = _aten.native_batch_norm(x, weight, bias, mean, var, True, momentum, ctx.eps)
        torch.nn.functional.leaky_relu_(y, ctx.slope)
        ctx.save_for_backward(y, weight, bias, invstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weight, bias, invstd = ctx.saved_tensors
        shape = (1, -1, 1, 1)
        positive = y > 0
        dz = torch.where(positive, dy, dy * ctx.slope)
        x_hat = torch.where(positive, y, y / ctx.slope).sub_(bias.view(shape)).div_(weight.view(shape))
        # BatchNorm's own backward on x̂, whose mean is 0 and whose variance 1; dx = dx̂ / σ.
        zero, one = torch.zeros_like(invstd), torch.ones_like(invstd)
        dx, dweight, dbias = _aten.native_batch_norm_backward(
            dz, x_hat, weight, zero, one - ctx.eps, zero, one, True, ctx.eps, [True, True, True]
        )
        return dx.mul_(invstd.view(shape)), dweight, dbias, None, None, None, None, None
