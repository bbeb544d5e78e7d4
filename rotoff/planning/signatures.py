"""What tells apart the inputs of steps that need plans of their own."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..tape.operators import settings
from ..tensors.torch_settings import in_region
from ..tensors.tree import leaves

_told_of_parameter = attrgetter("shape", "dtype", "requires_grad")
Sizes = tuple[tuple[int, ...], ...]  # the shape of each tensor of the input


def signature(value: Any, model: nn.Module) -> Any:
    """All that a step's bytes depend on: the input's tensors, autocast, the settings that choose kernels, the model's
    parameters and training modes."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    shapes = tuple(map(_shape, tensors))
    types = {"cpu", *(t.device.type for t in tensors)} - {"meta"}  # of which autocast knows nothing
    autocast = ((t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))) for t in sorted(types))
    todo, known = [model], {id(model)}  # faster than ``model.modules()``, which nests a generator for each level
    for module in todo:
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    todo.append(child)
    found = [p for module in todo if module._parameters for p in module._parameters.values() if p is not None]
    parameters = tuple(map(_told_of_parameter, found))
    modes = tuple([module.training for module in todo])
    return shapes, (in_region(), *autocast, *map(str, settings())), parameters, modes


def family_of(key: Any) -> tuple[Any, Sizes]:
    """Split a `signature` into what inputs of all sizes share, and the sizes."""
    shapes, *rest = key
    return (tuple((len(shape), *others) for shape, *others in shapes), *rest), tuple(shape for shape, *_ in shapes)


def constants(value: Any) -> str:
    """The input's leaves that are no tensors, as text; the operations may depend on them."""
    return repr([leaf for leaf in leaves(value) if not isinstance(leaf, torch.Tensor)])


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    told = tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return told
    return *told, tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
