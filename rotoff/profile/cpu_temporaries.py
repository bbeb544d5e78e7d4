"""What oneDNN's convolutions on the CPU take and give back inside, as the profiler's memory events show it.

A convolution reorders its input, weight and output into a layout blocked by channels, padded to whole blocks (8 numbers with
AVX2, 16 with AVX-512): the blocked copies stand beside each other while it computes, then its output is allocated and filled
from the blocked one. Inputs of up to 3 channels stay as they are. The backward does so twice: for the input's gradient and for the weight's.
Scratch beyond these copies (up to a few copies of the weight, for some shapes) is not known from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_PLAIN_CHANNELS = 3  # of an input that is read as it lies
_aten = torch.ops.aten

# A step of an operation: bytes that come and go, or the output (its number) that is made then.
Step = tuple[str, int]


def steps(func: Any, args: Any, result: Any) -> list[Step] | None:
    """("hidden", bytes) and ("output", number) in order; None for operations with nothing hidden."""
    if func is _aten.convolution.default:
        x, weight = args[0], args[1]
        if not _blocked(x, weight):
            return None
        return list(_forward(_padded(x, _PLAIN_CHANNELS), _padded_weight(weight), _padded(result)))
    if func is _aten.convolution_backward.default:
        grad, x, weight = args[:3]
        if not _blocked(x, weight):
            return None
        return list(_backward(grad, x, weight, args[-1]))
    return None


def _forward(x: int, weight: int, y: int) -> Iterator[Step]:
    yield "hidden", x + weight + y
    yield "output", 0
    yield "hidden", y


def _backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]) -> Iterator[Step]:
    outer, inner, middle = _padded(grad), _padded(x), _padded_weight(weight)
    if mask[0]:
        yield "hidden", outer + middle + inner
        yield "output", 0
        yield "hidden", inner
    if mask[1]:
        yield "hidden", outer + (x.nbytes if x.shape[1] <= _PLAIN_CHANNELS else inner) + middle
        yield "output", 1
        yield "hidden", middle


def _blocked(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN takes the convolution, and not in the channels-last layout, which needs no copies."""
    return (
        torch.backends.mkldnn.is_available()
        and x.dtype == torch.float32
        and x.dim() == 4
        and x.is_contiguous()
        and (x.shape[0] > 1 or x.numel() > 20480 or weight.shape[-1] > 3 or weight.shape[1] != x.shape[1])
    )


def _block() -> int:
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _padded(tensor: torch.Tensor, plain: int = 0) -> int:
    """Bytes of the blocked copy of an activation; 0 where it needs none."""
    channels = tensor.shape[1]
    return 0 if channels <= plain else tensor.nbytes // channels * _up(channels)


def _padded_weight(weight: torch.Tensor) -> int:
    out, into = weight.shape[:2]
    return weight.nbytes // (out * into) * _up(out) * (into if into <= _PLAIN_CHANNELS else _up(into))


def _up(channels: int) -> int:
    block = _block()
    return -(-channels // block) * block
