"""PyTorch's global settings that decide which kernels run and of which dtype tensors are made, around what is recorded,
measured and replayed: a replay runs the kernels of the first run, whatever the settings are in the backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

KernelFlags = tuple[Any, ...]


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


_C = torch._C
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
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
GETTERS = tuple([getter for getter, _ in _FLAGS])


def kernel_flags() -> KernelFlags:
    """Return the present settings, in the order of `GETTERS`."""
    return tuple([get() for get in GETTERS])


def kernels_as(before: KernelFlags) -> ExitStack:
    """Set the settings as they were `before`, until the returned stack is closed."""
    stack = ExitStack()
    if (now := kernel_flags()) != before:
        stack.callback(partial(_set, now))
        _set(before)
    return stack


def _set(flags: KernelFlags) -> None:
    for (getter, setter), value in zip(_FLAGS, flags, strict=True):
        if getter() is not value:
            setter(value)
