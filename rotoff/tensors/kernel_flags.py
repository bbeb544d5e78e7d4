"""PyTorch's global settings that decide which kernels run and of which dtype tensors are made, around what is recorded,
measured and replayed: a replay runs the kernels of the first run, whatever the settings are in the backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..accelerator import ACCELERATORS

KernelFlags = tuple[Any, ...]


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


_C = torch._C
Flag = tuple[Callable[[], Any], Callable[[Any], object]]
_FLAGS: tuple[Flag, ...] = (
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    # of attention
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_overrideable_sdp_enabled, _C._set_sdp_use_overrideable),
    (_C._get_deterministic_algorithms, _set_deterministic),
    (torch.get_default_dtype, torch.set_default_dtype),
)
GETTERS = tuple([getter for getter, _ in _FLAGS])  # of those that are asked around each call


def _unless_mixed(getter: Callable[[], Any]) -> Any:
    """Return an old setting of float32's precision; None where new ones were set beside it, which PyTorch refuses to
    express in the old one's terms."""
    try:
        return getter()
    except RuntimeError:
        return None


def _old(name: str) -> Flag:
    setter = getattr(_C, f"_set_{name}")
    return partial(_unless_mixed, getattr(_C, f"_get_{name}")), lambda value: value is None or setter(value)


def _set_precision(backend: str, op: str, value: str) -> None:
    _C._set_fp32_precision_setter(backend, op, "none")
    if _C._get_fp32_precision_getter(backend, op) != value:  # else it follows that of the backend, or of all
        _C._set_fp32_precision_setter(backend, op, value)


def _precision(backend: str, op: str) -> Flag:
    return partial(_C._get_fp32_precision_getter, backend, op), partial(_set_precision, backend, op)


def _of_name(name: str) -> Flag:
    setter = getattr(_C, f"_set_{name}")
    return getattr(_C, f"_get_{name}"), lambda value: setter(*value) if isinstance(value, tuple) else setter(value)


OLD_PRECISIONS = ("float32_matmul_precision", "cudnn_allow_tf32")  # setting these sets some of the new ones
REDUCTIONS = (
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "cpu_allow_fp16_reduced_precision_reduction",
    "math_sdp_allow_fp16_bf16_reduction",
    "blas_preferred_backend",
    "linalg_preferred_backend",
)
# How precise kernels are, and whose. Slow to ask: once for a stage, and around each call once one was set (`SETTERS`).
_PRECISIONS: tuple[Flag, ...] = (
    *map(_old, OLD_PRECISIONS),
    *(_precision(*place) for place in itertools.product((*ACCELERATORS, "mkldnn"), ("matmul", "conv", "rnn"))),
    *map(_of_name, REDUCTIONS),
)
SETTERS = (  # in `torch._C`
    *(f"_set_{name}" for name in (*OLD_PRECISIONS, *REDUCTIONS, "cublas_allow_tf32", "onednn_allow_tf32")),
    "_set_fp32_precision_setter",
)
_EVERY = (*_FLAGS, *_PRECISIONS)


def kernel_flags() -> KernelFlags:
    """Return the present settings; first those of `GETTERS`."""
    return tuple([get() for get, _ in _EVERY])


def matmuls_in_tf32() -> bool:
    """Return whether an accelerator may multiply float32 matrices less precisely than float32."""
    return str(_C._get_fp32_precision_getter(ACCELERATORS[0], "matmul")) not in ("none", "ieee")


def kernels_as(before: KernelFlags) -> ExitStack:
    """Set the settings as they were `before`, until the returned stack is closed."""
    stack = ExitStack()
    if (now := kernel_flags()) != before:
        stack.callback(partial(_set, now))
        _set(before)
    return stack


def _set(flags: KernelFlags) -> None:
    for (getter, setter), value in zip(_EVERY, flags, strict=True):
        if getter() != value:
            setter(value)
