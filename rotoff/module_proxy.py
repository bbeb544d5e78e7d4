"""A base class that makes a `Checkpointable` look like its model: attributes, items and names are the model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_PREFIX = "_model."
_TORCHS = frozenset({*vars(nn.Module()), "_model"})


class ModuleProxy(nn.Module):
    """A module that wraps `model` and stands in for it.

    _own: names of instance attributes that belong to the subclass, not to the model.
    """

    _own: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.training = model.training
        self._register_state_dict_hook(_strip_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_model":
                raise
            return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute is this module's own. All others are set on the model, so that its forward sees them."""
        own = (
            name in _TORCHS
            or name in self._own
            or name in vars(self)
            or any(name in vars(cls) for cls in type(self).__mro__)
        )
        return own or "_model" not in vars(self).get("_modules", ())  # there is no model yet

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Registers on the model, as do `register_parameter` and `add_module`."""
        self._model.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._model.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if self._is_own(name):  # the model itself: SyncBatchNorm's conversion adds each child to its parent again
            super().add_module(name, module)
        else:
            self._model.add_module(name, module)

    def __getitem__(self, index: Any) -> Any:
        return self._model[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._model)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._model)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._model)  # type: ignore[call-overload]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model's names, so that names of modules, parameters and buffers do not show the wrapper."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self._model.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """``torch.distributed.checkpoint`` leaves the attributes that are values here out of names, as `state_dict`
        does."""
        return {"": "_model"}


def _strip_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
    inner = prefix + _PREFIX
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = prefix + _PREFIX
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key[len(prefix) :]] = state.pop(key)
