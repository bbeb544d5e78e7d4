"""What a recorded forward could have read of its modules' own Python values, to notice when someone changes it.

A dropout rate, a ``training`` flag of a part, a frozen parameter, a block put in another's place, a setting in the model's
configuration: the recording holds what followed from them, so a change makes it another model, which is measured and planned anew.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..errors import MeasureError

_SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
_DEPTH = 3  # of configurations within configurations
# attributes that every module has, which are watched otherwise
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Within, every setting ``use_cache`` that `model` and its modules hold, or their configurations, is False.

    For forwards that read it there rather than take it as an argument; training has no use for keys and values kept.
    """
    held: list[dict[str, Any]] = []
    for module in model.modules():
        for value in (module, *vars(module).values()):
            attributes = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
            if attributes.get("use_cache") is True:
                held.append(attributes)
    for attributes in held:
        attributes["use_cache"] = False
    try:
        yield
    finally:
        for attributes in held:
            attributes["use_cache"] = True


class ModuleState:
    """The plain values held by `model`, its modules and their configurations, which modules those are, and which parameters need a
    gradient.

    Attributes that are made later, or that the forward itself changes (`settle`), are not watched.

    Args:
        called: whether the modules themselves are called in each step. Then they read their own settings and run their own
            hooks, so that only what decides about stages is watched.
    """

    def __init__(self, model: nn.Module, called: bool = False) -> None:
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._contents: list[tuple[dict[str, Any], str, Any, Any]] = []  # lists, dicts and sets, and copies of them
        self._tables: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._missing: list[tuple[dict[str, Any], str]] = []  # parameters and buffers that are None
        self._sizes: list[tuple[dict[Any, Any], int]] = []
        self._parameters: list[tuple[dict[str, Any], str, bool]] = []
        self._children: list[tuple[dict[str, Any], list[Any]]] = []
        seen: set[int] = set()
        for module in model.modules():
            if module._modules or not module._parameters:
                self._children.append((module._modules, list(module._modules.values())))
            self._parameters += [
                (module._parameters, name, p.requires_grad) for name, p in module._parameters.items() if p is not None
            ]
            if called:
                self._values.append((vars(module), "training", module.training))
                if module is model or not isinstance(module, nn.Sequential):
                    continue
            self._sizes += [(vars(module)[name], len(vars(module)[name])) for name in _HOOKS]
            if called:
                continue
            for table in (module._parameters, module._buffers):
                self._sizes.append((table, len(table)))
                self._missing += [(table, name) for name, tensor in table.items() if tensor is None]
            self._values.append((vars(module), "forward", vars(module).get("forward", self)))
            self._watch(vars(module), seen, _DEPTH)

    def refuse_borrowed(self) -> None:
        """Raise MeasureError where parameters were put in for the time of a forward, so that a replay would not see them."""
        for attributes, name, _ in self._parameters:
            if type(attributes.get(name)) is torch.Tensor:
                raise MeasureError(
                    f"parameter {name!r} is a plain tensor in this forward (torch.func.functional_call), which replays in the backward"
                    " would not see; copy the values into the model's parameters, or plan with mode='offload', which replays nothing"
                )

    def _watch(self, attributes: dict[str, Any], seen: set[int], depth: int) -> None:
        for name, value in list(attributes.items()):
            if name in _TORCHS:
                continue
            if _plain(value):
                self._values.append((attributes, name, value))
            elif type(value) in (list, dict, set):
                if all(map(_plain, value.values() if isinstance(value, dict) else value)):
                    self._contents.append((attributes, name, value, value.copy()))
            elif (
                hasattr(value, "__dict__")
                and not isinstance(value, (nn.Module, torch.Tensor, type))
                and id(value) not in seen
            ):
                seen.add(id(value))
                if not callable(value) and depth:
                    self._watch(vars(value), seen, depth - 1)

    def watch_tables(self, model: nn.Module, tables: Sequence[torch.Tensor]) -> None:
        """Watch which of `tables`, tensors that a recording holds, are attributes of `model` and its modules."""
        used = {id(table) for table in tables}
        for module in model.modules() if used else ():
            self._tables += [(vars(module), name, value) for name, value in vars(module).items() if id(value) in used]

    def settle(self, attributes: Sequence[tuple[nn.Module, str]] = ()) -> None:
        """Stop watching what has changed since, and `attributes`, which every step sets."""
        own = {(id(vars(module)), name) for module, name in attributes}
        self._values = [
            (held, name, value)
            for held, name, value in self._values
            if held.get(name, self) == value and (id(held), name) not in own
        ]
        self._contents = [entry for entry in self._contents if not _other(*entry)]

    def unchanged(self) -> bool:
        """Whether everything watched is as it was."""
        for attributes, name, value in self._values:
            now = attributes.get(name, self)
            if now is not value and now != value:
                return False
        if any(_other(*entry) for entry in self._contents):
            return False
        if any(held.get(name) is not tensor for held, name, tensor in self._tables):
            return False
        if any(held.get(name) is not None for held, name in self._missing):
            return False
        for attributes, name, needs in self._parameters:
            parameter = attributes.get(name)
            if parameter is None or parameter.requires_grad != needs:
                return False
        for modules, before in self._children:
            if list(modules.values()) != before:
                return False
        return all(len(hooks) == size for hooks, size in self._sizes)


def _plain(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (isinstance(value, tuple) and all(map(_plain, value)))


def _other(attributes: dict[str, Any], name: str, container: Any, content: Any) -> bool:
    """Whether the attribute holds anything else than `content`. A list that was empty may have grown: a history, most often."""
    now = attributes.get(name)
    if now is container and isinstance(now, list) and not content:
        return False
    return type(now) is not type(container) or bool(now != content)
