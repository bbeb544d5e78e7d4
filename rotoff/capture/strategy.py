"""How a model is cut into stages: the way that fits it, tried in order.

1. ``nn.Sequential``: its modules (`sequential`); the chain's input is the one argument.
2. Any model whose forward ``torch.fx`` can trace: its graph, cut where few bytes cross (`graph`); the chain's input is the
   tuple of all of forward's arguments, defaults filled in.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import MeasureError
from ..runtime.replay import preserved
from . import graph, sequential
from .stage import StageModule

CURE = "make the model an nn.Sequential of its stages"


def is_sequential(model: nn.Module) -> bool:
    """Whether the model's forward is that of ``nn.Sequential``."""
    return type(model).forward is nn.Sequential.forward


def chain_input(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What flows into the first stage when `model` is called with `args` and `kwargs`.

    Raises:
        MeasureError: where the arguments are not forward's, or forward takes any number of them.
    """
    if is_sequential(model):
        if kwargs or len(args) != 1:
            raise MeasureError("an nn.Sequential takes one positional argument: a tensor, or a tuple of tensors")
        return args[0]
    signature = inspect.signature(model.forward)
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise MeasureError(
                f"forward of {type(model).__name__} takes any number of arguments (*{parameter.name}), which cannot be traced;"
                f" {CURE}"
            )
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MeasureError(f"forward of {type(model).__name__} cannot be called like this: {error}") from error
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def stages(model: nn.Module, value: Any, device: torch.device) -> list[StageModule]:
    """The stages of `model` for inputs like `value`, a result of `chain_input`; the model is left as it was.

    Raises:
        MeasureError: where no way fits; the sentence says what was tried and what to do.
    """
    if is_sequential(model):
        return sequential.stages(model)
    try:
        with preserved(list(StageModule("", (model,)).buffers()), device):
            return graph.stages(model, value)
    except MeasureError as error:
        raise MeasureError(f"the model is no nn.Sequential, and {error}; {CURE}") from error
