"""Operations that CUDA runs differently from the CPU; an estimate for a CUDA device runs on fake CPU tensors.

PyTorch built without CUDA cannot differentiate a tensor on a GPU, not even a fake one. Nearly all operations make the
same tensors on both devices. The exceptions check the device in their C++ code: dropout keeps a mask of one byte per
element, and attention runs in a fused kernel that saves its rows' log-sum-exp. While `device_variants` is active, such
calls on fake tensors run the operations that CUDA would run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .devices import Device

_aten = torch.ops.aten
_MATH = _aten._scaled_dot_product_attention_math.default
ADDS_MASK = ContextVar("adds_mask", default=False)  # whether `_MATH` runs, which adds a mask in place to plain tensors
_FLASH_WIDTH = 256  # the widest head of the flash kernels
_CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))  # capabilities for which PyTorch prefers cuDNN, if it is above 9.15.0
_BIAS_ALIGNMENT = 16  # elements; rows of a mask in the memory-efficient kernels


@contextmanager
def device_variants(device: Device) -> Iterator[None]:
    """Run composite operations on fake tensors as `device` runs them on plain ones."""
    library = torch.library.Library("aten", "IMPL")
    variants = {_MATH: _math} | ({} if device.capability is None else _variants(device.capability))
    try:
        for op, variant in variants.items():
            library.impl(op.name(), _for_fakes(op, variant), "AutogradCPU")
        yield
    finally:
        library._destroy()


def _for_fakes(op: Any, variant: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor):
            return variant(*args, **kwargs)
        return op.decompose(*args, **kwargs)

    return run


def _math(*args: Any, **kwargs: Any) -> Any:
    token = ADDS_MASK.set(True)
    try:
        return _MATH.decompose(*args, **kwargs)
    finally:
        ADDS_MASK.reset(token)


def _variants(capability: tuple[int, int]) -> dict[Any, Callable[..., Any]]:
    attention = _aten.scaled_dot_product_attention.default

    def sdpa(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        kind = _attention_kernel(capability, query, key, value, attn_mask, dropout_p)
        needs = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
        width = query.size(-1)
        if kind == "math":
            return _MATH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        if kind == "cudnn":
            mask = _additive(attn_mask, query.dtype)
            return _aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs, dropout_p, is_causal, False, scale=scale
            )[0]
        if kind == "flash":
            if width % 8:  # the kernels need multiples of 8
                scale = scale if scale is not None else width**-0.5
                query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
            result = _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return result[..., :width] if width % 8 else result
        if enable_gqa and key.size(-3) != query.size(-3):
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(attn_mask, query, key), needs, dropout_p, is_causal, scale=scale
        )[0]

    return {_aten.dropout.default: _dropout, attention: sdpa}


def _dropout(given: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if 0 < p < 1 and train and given.numel() > 0:
        result: torch.Tensor = _aten.native_dropout(given, p, True)[0]
        return result
    return _aten.dropout.default.decompose(given, p, train)


def _attention_kernel(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
) -> str:
    """Return the kernel that PyTorch's rules choose (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), given the
    user's switches."""
    from torch.backends import cuda

    same = query.dtype == key.dtype == value.dtype
    if not same or {query.dim(), key.dim(), value.dim()} != {4}:
        return "math"
    half = query.dtype in (torch.float16, torch.bfloat16)
    masked, width = mask is not None and mask.requires_grad, query.size(-1)
    if (
        cuda.cudnn_sdp_enabled()
        and half
        and not masked
        and capability in _CUDNN_FIRST
        and all(size % 8 == 0 and size <= (256 if capability == (9, 0) else 128) for size in (width, value.size(-1)))
        and key.size(-2) > 1
        and (query.size(-2) > 1 or dropout_p == 0)
        and (not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled())
    ):
        return "cudnn"
    if (
        cuda.flash_sdp_enabled()
        and half
        and mask is None
        and capability >= (8, 0)
        and width == value.size(-1) <= _FLASH_WIDTH
    ):
        return "flash"
    if (
        cuda.mem_efficient_sdp_enabled()
        and capability >= (5, 0)
        and (query.dtype == torch.float32 or half)
        and not (masked and dropout_p > 0)
        and width % (8 if half and capability >= (7, 0) else 4) == 0
    ):
        return "efficient"
    return "math"


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return `mask` as the tensor that is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    mask = _additive(mask, query.dtype)
    if mask is None:
        return None
    rows = mask.size(-1)
    if rows % _BIAS_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, (0, _BIAS_ALIGNMENT - rows % _BIAS_ALIGNMENT))[..., :rows]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
