"""Frozen weights that a tensor subclass wraps, of the kinds of torchao and bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

aten = torch.ops.aten


class Int8(torch.Tensor):
    """Rows of 8-bit integers, each with a scale: of the kind of torchao's weight-only tensors. FSDP2 shards and gathers
    it as torchao's NF4 tensors: by the tensors inside."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, numbers.stride(), dtype=scale.dtype)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> Int8:
        return cls(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.t.default, aten.slice.Tensor):
            return cls(func(args[0].numbers, *args[1:]), func(args[0].scale, *args[1:]))
        if func in (aten.view.default, aten.as_strided.default):
            return cls(func(args[0].numbers, *args[1:]), args[0].scale)
        if func is aten.split.Tensor:
            return [*map(cls, func(args[0].numbers, *args[1:]), func(args[0].scale, *args[1:]))]
        if func is aten.new_zeros.default:
            rows, _ = args[1]
            return cls(args[0].numbers.new_zeros(args[1]), args[0].scale.new_zeros(rows, 1))
        if func is aten.copy_.default and isinstance(args[1], cls):
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = [x.numbers * x.scale if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.numbers, self.scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (Int8(*outputs), outputs)


def own(linear: nn.Linear) -> nn.Linear:
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    numbers = (linear.weight.detach() / scale).round().to(torch.int8)
    linear.weight = nn.Parameter(Int8(numbers, scale), requires_grad=False)  # type: ignore[arg-type]
    return linear
