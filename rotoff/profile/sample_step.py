"""A step on a sample, with a backward from those outputs from which the caller's will start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.backward_from import LossAlone, output_named
from ..errors import MeasureError
from ..tensors.tree import look_into, tensor_leaves
from .recorded_step import RecordedStep


class Loss(torch.autograd.Function):
    """A loss whose gradient takes the bytes of a whole one, until it is used, and lies as an expanded one, which
    kernels copy."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.size = output.size()
        return output.new_ones(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_ones(ctx.size.numel()).as_strided(ctx.size, [0] * len(ctx.size))


def run_sample(
    step: RecordedStep, forward: Callable[[], Any], names: Sequence[str | int], loss: type[Any] = Loss
) -> list[torch.Tensor]:
    """Run `forward`, which `step` records, and a backward; return the tensors from which it started.

    Args:
        names: of the outputs from which it starts; none: all. loss: of each that is not a single number.

    Raises:
        MeasureError: if one of them is missing or needs no gradient, or as for `RecordedStep.check`.
    """
    result = forward()
    roots = _starts(result, names)
    if any(isinstance(name, LossAlone) for name in names):
        del result  # else its caller may hold it
    step.check(roots)
    losses = [loss.apply(t) if step.plain(t) and t.numel() != 1 else t for t in roots]
    torch.autograd.backward(losses, list(map(torch.ones_like, losses)))
    return roots


def _starts(result: Any, names: Sequence[str | int]) -> list[torch.Tensor]:
    look_into(result)
    roots = [] if names else [t for t in tensor_leaves(result) if t.requires_grad]
    for name in names:
        named = [t for t in tensor_leaves(output_named(result, name)) if t.requires_grad]
        if not named:
            raise MeasureError(
                f"backward_from names {name!r}, which needs no gradient on this input; call the model as in training"
                " (for example with labels), or name the output that the backward starts from"
            )
        roots += named
    return roots
