"""What a recorded forward could have read of its modules' own Python values, to notice when someone changes it.

A dropout rate, a ``training`` flag of a part, a frozen parameter, a block put in another's place, a setting in the model's
configuration: the recording holds what followed from them, so a change makes it another model, which is measured and planned anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import MeasureError
from .settings import GONE, Taken, Taker, alike, class_settings, plain

# attributes that every module has, which are watched otherwise
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def caches(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of `model`, its modules and their configurations that hold a setting ``use_cache`` which is True."""
    held: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        for value in (module, *vars(module).values()):
            attributes = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
            if attributes.get("use_cache") is True:
                held[id(attributes)] = attributes
    return list(held.values())


@contextmanager
def switched_off(held: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Within, the `caches` are off.

    For forwards that read the setting there rather than take it as an argument; training has no use for keys and values kept.
    """
    for attributes in held:
        attributes["use_cache"] = False
    try:
        yield
    finally:
        for attributes in held:
            attributes["use_cache"] = True


class ModuleState:
    """The settings held by `model`, its modules, their classes and their configurations, which modules those are, and which
    parameters need a gradient.

    Attributes that are made later, but for those over a class's own, or that the forward itself changes (`settle`), are not watched.

    Args:
        called: whether the modules themselves are called in each step. Then they read their own settings and run their own
            hooks, so that only what decides about stages is watched.
    """

    def __init__(self, model: nn.Module, called: bool = False) -> None:
        self._values: list[tuple[Mapping[str, Any], str, Any]] = []
        self._taken: list[tuple[Mapping[str, Any], str, Taken]] = []  # containers and objects
        self._tables: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._missing: list[tuple[dict[str, Any], str]] = []  # parameters and buffers that are None
        self._sized: list[dict[Any, Any]] = []  # of which the lengths are watched
        self._parameters: list[tuple[dict[str, Any], str, bool]] = []
        self._children: list[tuple[dict[str, Any], list[Any]]] = []
        taker = Taker()
        defaults: dict[type, list[str]] = {}  # by class of module, the names of what it holds for them
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
            self._sized += [vars(module)[name] for name in _HOOKS]
            if called:
                continue
            for table in (module._parameters, module._buffers):
                self._sized.append(table)
                self._missing += [(table, name) for name, tensor in table.items() if tensor is None]
            self._values.append((vars(module), "forward", vars(module).get("forward", GONE)))
            for name, value in vars(module).items():
                if name not in _TORCHS and not isinstance(value, torch.Tensor):  # for tensors see `settle`
                    self._watch(vars(module), name, value, taker)
            kind = type(module)
            if kind not in defaults:
                defaults[kind] = self._watch_class(kind, taker)
            self._values += [(vars(module), name, GONE) for name in defaults[kind] if name not in vars(module)]
        self._sizes = list(map(len, self._sized))

    def refuse_borrowed(self) -> None:
        """Raise MeasureError where parameters were put in for the time of a forward, so that a replay would not see them."""
        for attributes, name, _ in self._parameters:
            if type(attributes.get(name)) is torch.Tensor:
                raise MeasureError(
                    f"parameter {name!r} is a plain tensor in this forward (torch.func.functional_call), which replays in the backward"
                    " would not see; copy the values into the model's parameters, or plan with mode='offload', which replays nothing"
                )

    def _watch(self, held: Mapping[str, Any], name: str, value: Any, taker: Taker) -> bool:
        """Watch one attribute, if it can be told whether it changes."""
        if plain(value) or isinstance(value, nn.Module):
            self._values.append((held, name, value))
        elif (taken := taker.take(value)) is not None:
            self._taken.append((held, name, taken))
        else:
            return False
        return True

    def _watch_class(self, kind: type, taker: Taker) -> list[str]:
        """Watch what modules of class `kind` find in their class; its names, which may get a value of a module's own instead."""
        names = []
        for classes, name, value in class_settings(kind):
            if self._watch(vars(classes[-1]), name, value, taker):
                names.append(name)
                self._values += [(vars(nearer), name, GONE) for nearer in classes[:-1]]
        return names

    def settle(
        self, model: nn.Module, attributes: Sequence[tuple[nn.Module, str]] = (), tables: Sequence[torch.Tensor] = ()
    ) -> None:
        """Stop watching what has changed since, and `attributes`, which every step sets; watch where `model` and its modules hold
        `tables`, the tensors that a recording uses."""
        own = {(id(vars(module)), name) for module, name in attributes}
        used = {id(table) for table in tables}
        done: dict[int, bool] = {}
        self._values = [
            (held, name, value)
            for held, name, value in self._values
            if alike(value, held.get(name, GONE), {}) and (id(held), name) not in own
        ]
        self._taken = [
            (held, name, taken)
            for held, name, taken in self._taken
            if taken.settle(held.get(name, GONE), used, done) and (id(held), name) not in own
        ]
        for module in model.modules() if used else ():
            self._tables += [(vars(module), name, value) for name, value in vars(module).items() if id(value) in used]

    def what_changed(self, model: nn.Module) -> str:
        """What is not as it was, for a message, where `unchanged` says that something is."""
        owners = {id(vars(module)): f"attribute {{!r}} of a {type(module).__name__}" for module in model.modules()}
        for held, name, then in (*self._values, *self._taken):
            if not alike(then, held.get(name, GONE), {}):
                return owners.get(id(held), "attribute {!r} of a class").format(name)
        return next(
            (f"attribute {name!r}" for held, name, tensor in self._tables if held.get(name) is not tensor), "the model"
        )

    def unchanged(self) -> bool:
        """Whether everything watched is as it was."""
        for attributes, name, value in self._values:
            now = attributes.get(name, GONE)
            if now is not value and not alike(value, now, {}):
                return False
        compared: dict[int, Taken] = {}
        for attributes, name, taken in self._taken:
            now = attributes.get(name, GONE)
            if compared.get(id(now)) is not taken and not taken.matches(now, compared):
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
        return list(map(len, self._sized)) == self._sizes
