"""Corrects operations for which PyTorch's fake tensors differ from its kernels.

A `FakeTensorMode` answers most operations as the device would. There are two exceptions. The statistics of norms over
half precision are half precision on fake CPU tensors, while CUDA always keeps them in float32, and the CPU does if the
weight is float32. Grouped matrix products (mixtures of experts) are refused for other types than bfloat16, although
both devices support them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class FakeKernels(FakeTensorMode):
    """The mode of an estimate's fake tensors. cuda: whether they stand for a CUDA device."""

    def __init__(self, cuda: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._cuda = cuda

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return self._grouped(func, types, args, kwargs)
        result: Any = super().dispatch(func, types, args, kwargs)
        needs_float = _STATISTICS.get(func)
        if needs_float is None or args[0].dtype not in _HALVES or not needs_float(args, self._cuda):
            return result
        with self:
            return (result[0], *(torch.empty_like(t, dtype=torch.float32) for t in result[1:]))

    def _grouped(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        wanted = kwargs.pop("out_dtype", None) or args[0].dtype
        with self:
            given = [torch.empty_like(t, dtype=torch.bfloat16) for t in args[:2]]
        result: Any = super().dispatch(func, types, (*given, *args[2:]), kwargs)
        with self:
            return torch.empty_strided(result.size(), result.stride(), dtype=wanted)


def _mixed(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype == torch.float32


# for each operation: given its arguments and whether it runs on CUDA, whether its statistics are float32
_STATISTICS: dict[Any, Callable[[Any, bool], bool]] = {
    _aten.native_layer_norm.default: lambda args, cuda: cuda or _mixed(args[2]),
    _aten.native_group_norm.default: lambda args, cuda: _mixed(args[1]),
    _aten.native_batch_norm.default: lambda args, cuda: cuda or _mixed(args[1]) or _mixed(args[3]),
    _aten._native_batch_norm_legit.default: lambda args, cuda: cuda or _mixed(args[1]) or _mixed(args[3]),
    _aten._native_batch_norm_legit.no_stats: lambda args, cuda: cuda or _mixed(args[1]),
}
