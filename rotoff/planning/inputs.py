"""What a model is called with, and what tells apart the inputs of steps that need plans of their own."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import MeasureError
from ..tape.operators import settings
from ..tensors.torch_settings import in_region
from ..tensors.tree import leaves, look_into, tensor_leaves


def chain_input(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments with which a training step calls `model`, given those of its caller.

    If the caller does not set ``use_cache``, it is switched off: training does not need cached keys and values.

    Raises:
        MeasureError: if the arguments do not fit forward, or the model has no forward in Python.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise MeasureError(
            f"the model is scripted or traced ({model.original_name}), so its forward runs as one piece; give the"
            " module that it was made from, parts of which may be scripted"
        )
    look_into((args, kwargs))
    signature = _signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MeasureError(
            f"forward of {type(model).__name__} cannot be called like this: {error}; give what you call the model with"
        ) from error
    if "use_cache" in signature.parameters and bound.arguments.get("use_cache") is None:
        bound.arguments["use_cache"] = False
    return bound.args, bound.kwargs


_SIGNATURES: weakref.WeakKeyDictionary[FunctionType, inspect.Signature] = weakref.WeakKeyDictionary()


def _signature(forward: Any) -> inspect.Signature:
    """Return the cached signature, because `inspect.signature` is slow and needed in every step."""
    function = getattr(forward, "__func__", None)
    if type(function) is not FunctionType:
        return inspect.signature(forward)
    if (known := _SIGNATURES.get(function)) is None:
        known = _SIGNATURES[function] = inspect.signature(forward)
    return known


def check_measurable(model: nn.Module, value: Any) -> None:
    """Raise MeasureError if no step can be measured here on these tensors."""
    if torch.is_inference_mode_enabled():
        raise MeasureError("the model cannot be measured within torch.inference_mode(); measure it outside")
    refuse_meta(model, value)
    refuse_lazy(model)


def refuse_meta(model: nn.Module, value: Any) -> None:
    """Raise MeasureError if the model or a tensor of the input is on the meta device. A part of the model may be there,
    as what ``torch.func.functional_call`` is given for its code."""
    parameters = [p.is_meta for p in model.parameters()]
    if (parameters and all(parameters)) or any(t.is_meta for t in tensor_leaves(value)):
        raise MeasureError(
            "the model or its input is on the meta device, where nothing can be measured; give real ones, or use"
            ' rotoff.estimate(model, sample, device="H200") or rotoff.plan, which calculate'
        )


def read_sample(
    model: nn.Module, sample: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a sample stands for: a single dict is passed as keywords if forward accepts those
    names."""
    scripted = isinstance(model, torch.jit.ScriptModule)
    if len(sample) == 1 and not kwargs and isinstance(sample[0], Mapping) and not scripted:
        with suppress(TypeError):
            inspect.signature(model.forward).bind(**sample[0])
            return (), dict(sample[0])
    return sample, kwargs


def lazy(model: nn.Module) -> str | None:
    """Return the name of a parameter or buffer whose shape the first forward finds; None if there is none."""
    every = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in every if is_lazy(tensor)), None)


def refuse_lazy(model: nn.Module) -> None:
    """Raise MeasureError if a parameter or buffer has no shape yet."""
    if (name := lazy(model)) is not None:
        raise MeasureError(
            f"{name!r} of the model has no shape before the first forward (a lazy module); run the plain model once on"
            " a sample, or train a step, and measure then"
        )


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


def size_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; of a nested one, whose own is a symbol that each has anew, that of its values."""
    return tuple(tensor.values().shape if tensor.is_nested else tensor.shape)


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    told = size_of(tensor), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return told
    return *told, tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
