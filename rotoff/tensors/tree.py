"""Turns values into lists of tensors, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a pytree; faster than torch for tuples, lists and dicts."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, torch.Tensor):
        return [value]
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return pytree.tree_leaves(value)
    return [leaf for one in value for leaf in leaves(one)]


_PLAIN = frozenset({torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout})


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a pytree, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def flatten(value: Any) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Any]]:
    """Return the tensors in `value` (a tensor, or tuples, lists and dicts of them), and a function that rebuilds
    `value` with other tensors in their places."""
    rest = pytree.tree_map_only(torch.Tensor, lambda _: _PLACE, value)  # holds no tensor alive

    def rebuild(tensors: list[torch.Tensor]) -> Any:
        left = iter(tensors)
        return pytree.tree_map(lambda leaf: next(left) if leaf is _PLACE else leaf, rest)

    return tensor_leaves(value), rebuild


_PLACE = object()


def look_into(value: Any) -> None:
    """Register with torch's pytrees the class of each dataclass instance in `value`, at any depth, unless its user has
    done so.

    A class with a field that its constructor does not take is not registered, and so is refused like any other object:
    it could not be rebuilt from its fields.
    """
    while new := {type(leaf) for leaf in leaves(value) if dataclasses.is_dataclass(leaf) and _made_of_fields(leaf)}:
        for cls in new:
            pytree.register_dataclass(cls)


def _made_of_fields(leaf: Any) -> bool:
    return not isinstance(leaf, type) and all(field.init for field in dataclasses.fields(leaf))
