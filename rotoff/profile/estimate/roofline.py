"""Estimates the seconds of an operation from its operation count and its bytes: the roofline model.

    time = max(operations / (peak of the type x efficiency), bytes / (memory bandwidth x efficiency)) + launch

(Williams, Waterman, Patterson: Roofline, CACM 2009). ``torch.utils.flop_counter`` counts the operations. An operation
without a formula there is assumed to be bound by memory: it reads every input once and writes every output once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ...accelerator import ACCELERATORS
from ...tape.operators import kind_of
from ...tensors.storage import pieces
from ...tensors.tree import tensor_leaves
from .devices import Device

_TYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
    torch.complex128: "float64",
}
_CONVOLUTIONS = ("convolution", "_cudnn_rnn")  # cuDNN runs these in TF32 by default


def seconds_of(device: Device, func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the seconds that the operation `func` takes on `device`. Its tensors need no contents. 0 for views."""
    if _only_views(func):
        return 0.0
    outputs, inputs = tensor_leaves(result), tensor_leaves((args, kwargs))
    if not outputs and not inputs:
        return 0.0
    formula = flop_registry.get(func.overloadpacket)
    operations = formula(*args, **kwargs, out_val=result) if formula is not None else 0
    kind = next((_TYPES[t.dtype] for t in outputs or inputs if t.dtype in _TYPES), "float32")
    if kind == "float32" and "tf32" in device.flops:
        in_tf32 = func.overloadpacket.__name__.startswith(_CONVOLUTIONS) or matmuls_in_tf32()
        kind = "tf32" if in_tf32 else kind
    moved = _touched(outputs) + (0 if func.overloadpacket.__name__ in _WRITE_ONLY else _touched(inputs))
    seconds = operations / (device.peak(kind) * device.compute_efficiency)
    return max(seconds, moved / (device.memory_bandwidth * device.memory_efficiency)) + device.launch_time


# operators by name, whatever the overload
_WRITE_ONLY = {"zero_", "fill_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "bernoulli_"}
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_"}


def _only_views(func: Any) -> bool:
    return kind_of(func).view or func.overloadpacket.__name__ in _NOTHING


def _touched(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of `tensors`, those of expanded tensors once."""
    return sum(
        min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for whole in tensors for t in pieces(whole)
    )


def matmuls_in_tf32() -> bool:
    """Whether an accelerator may multiply float32 matrices less precisely than float32."""
    return str(torch._C._get_fp32_precision_getter(ACCELERATORS[0], "matmul")) not in ("none", "ieee")
