"""Temporaries inside CPU kernels, as the profiler's memory events show them.

oneDNN's convolutions reorder input, weight and output into a layout blocked by channels and padded to whole blocks (8
numbers, or 16 with AVX-512 and one group). The blocked copies exist together during the computation; then the output is
allocated and filled from its copy; a bias is added to that of a transposed one, which makes another. Inputs of up to 3
channels are not copied. The backward does so twice: for the input's gradient and for the weight's. A 1×1 convolution of
stride 1 is one matrix product and needs no copies. PyTorch's own kernels make the columns of a matrix. Further scratch
memory (up to a few copies of the weight, for some shapes and in the backward in half precision) is unknown, and so is
that of matrix products in half precision.

The backward of batch norm makes the input's gradient twice and frees the first. Layer norms copy what is noncontiguous,
and their backward adds up the weight's gradients in each thread. `torch.roll` over several dimensions makes a tensor
for each. Fused attention allocates blocks for each thread.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

_PLAIN = 3  # the most channels of an input that is not copied
_ROWS, _COLUMNS = ((768, 256), (192, 64), (0, 32)), 512  # of a block of fused attention, by the number of queries
# PyTorch's kernels of convolutions: oneDNN's; its own, which make columns; those of them that do of all images at once
_Kernel: Any = torch._C._ConvBackend  # type: ignore[attr-defined]
_ONEDNN_TRANSPOSED = int(_Kernel.Mkldnn) + 1  # has no name in Python
_ONEDNN = {int(_Kernel.Mkldnn), _ONEDNN_TRANSPOSED}
_SLOW = {int(kernel) for name, kernel in _Kernel.__members__.items() if name.startswith("Slow")}
_WHOLE = {int(_Kernel.Slow2d), int(_Kernel.Slow3d)}
_TRANSPOSED = {_ONEDNN_TRANSPOSED, int(_Kernel.SlowTranspose2d), int(_Kernel.SlowTranspose3d)}
_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def temporary_bytes(func: Any, args: Any, result: Any) -> int:
    """Return the most bytes that a kernel holds, beyond those of its outputs."""
    if func is _aten.convolution.default:
        return _convolution(args, result)
    if func is _aten.convolution_backward.default:
        return _convolution_backward(args, result)
    if func is _aten.native_batch_norm_backward.default:
        grad, x, *_, mask = args
        return x.nbytes if mask[0] and x.is_contiguous() and grad.is_contiguous() else 0
    if func is _aten.native_layer_norm.default:
        return _copy(args[0])
    if func is _aten.native_layer_norm_backward.default:
        sums = 2 * args[1].element_size() * prod(args[2]) * torch.get_num_threads()
        return _copy(args[0]) + _copy(args[1]) + sums
    if func is _aten.roll.default:
        return result.nbytes if len(args[2] if len(args) > 2 else ()) > 1 else 0
    return _attention(func, args) if func in (_ATTENTION, _ATTENTION_BACKWARD) else 0


def convolution_kernel(*args: Any) -> int:
    """Return which kernel PyTorch chooses for a convolution with these arguments."""
    kernel: Any = torch._C._select_conv_backend(*args)
    return int(kernel)


def _convolution(args: Any, y: torch.Tensor) -> int:
    x, weight = args[0], args[1]
    kernel = convolution_kernel(x, weight, None, *args[3:])
    if not _blocked(kernel, x):
        return _columns(kernel, x, weight, y)
    if _pointwise(weight, *args[3:]):
        return _copy(x)
    groups = args[-1]
    before = _padded_weight(weight, groups) + (0 if x.shape[1] <= _PLAIN else _padded(x, groups))
    added = y.nbytes if kernel in _TRANSPOSED and args[2] is not None else 0
    return _copy(x) + _padded(y, groups) + added + max(0, before - y.nbytes)


def _convolution_backward(args: Any, results: Any) -> int:
    grad, x, weight, *_, groups, mask = args
    kernel = convolution_kernel(x, weight, None, *args[4:-1])
    if not _blocked(kernel, x):
        return _columns(kernel, x, weight, grad)
    if _pointwise(weight, *args[4:-1]):
        return _copy(x) + _copy(grad)
    outer, inner, middle = _padded(grad, groups), _padded(x, groups), _padded_weight(weight, groups)
    there, levels = 0, [0]
    if mask[0]:
        there = results[0].nbytes
        levels += [outer + middle + inner, there + inner]
    if mask[1]:
        before = 0 if x.shape[1] <= _PLAIN else inner
        levels += [there + outer + before + middle, there + results[1].nbytes + middle]
    outputs = sum(t.nbytes for t in results if t is not None)
    return max(0, max(levels) + _copy(x) + _copy(grad) - outputs)


def _columns(kernel: int, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> int:
    """Return the bytes of images as the columns of a matrix, of which PyTorch's own kernels make a product."""
    if kernel not in _SLOW or max(weight.shape[2:]) == 1:
        return 0
    image = x if kernel in _TRANSPOSED else y
    images = image if kernel in _WHOLE else image[:1]
    return images.numel() // image.shape[1] * weight[0].numel() * image.element_size()


def _copy(tensor: torch.Tensor) -> int:
    """Return the bytes of the copy that a kernel makes of a noncontiguous tensor first."""
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _pointwise(
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    _: Any,
    groups: int,
) -> bool:
    """Whether a convolution is one matrix product over its tensors as they are."""
    return max(weight.shape[2:]) == max(stride) == groups == 1 and not max(padding) and not transposed


def _attention(func: Any, args: Any) -> int:
    """Return the bytes that fused attention (ATen/native/cpu/FlashAttentionKernel.cpp) takes: blocks for each thread,
    and a copy."""
    query, key = args[:2] if func is _ATTENTION else args[1:3]
    length, width = query.shape[2], query.shape[3]
    rows = min(length, next(size for least, size in _ROWS if length >= least))
    columns = min(key.shape[2], _COLUMNS)
    half = query.element_size() if query.element_size() < 4 else 0
    number = 8 if query.dtype == torch.float64 else 4
    if func is _ATTENTION:
        nbytes = number * (rows * columns + 2 * rows + rows * width) + half * rows * columns
    else:
        nbytes = number * (2 * rows * columns + rows) + half * 2 * rows * columns
    copy = 0 if func is _ATTENTION else _copy(args[0].transpose(1, 2))  # it is read with a token's heads adjacent
    return nbytes * torch.get_num_threads() + copy


def _blocked(kernel: int, x: torch.Tensor) -> bool:
    """Whether oneDNN runs the convolution in its blocked layout; channels-last needs no copies."""
    formats = torch.channels_last, torch.channels_last_3d
    return kernel in _ONEDNN and (x.is_contiguous() or not any(x.is_contiguous(memory_format=one) for one in formats))


def _padded(tensor: torch.Tensor, groups: int) -> int:
    """Return the bytes of the blocked copy of an activation."""
    channels = tensor.shape[1]
    return tensor.nbytes // channels * _up(channels, groups)


def _padded_weight(weight: torch.Tensor, groups: int) -> int:
    out, into = weight.shape[:2]
    return weight.nbytes // (out * into) * _up(out, groups) * (into if into <= _PLAIN else _up(into, groups))


def _up(channels: int, groups: int) -> int:
    block = 16 if groups == 1 and torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8
    return -(-channels // block) * block
