"""Arguments and results of calls of torch: the tensors in them, and their leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

NESTED = frozenset({tuple, list, dict, slice})
VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis)})


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to every leaf within tuples, lists, dicts, slices and pytree nodes."""
    kind = type(value)
    if kind is tuple:
        return tuple([replaced(v, change) for v in value])
    if kind is list:
        return [replaced(v, change) for v in value]
    if kind is dict:
        return {k: replaced(v, change) for k, v in value.items()}
    if kind is slice:
        return slice(replaced(value.start, change), replaced(value.stop, change), replaced(value.step, change))
    if isinstance(value, (tuple, dict)) or kind in pytree.SUPPORTED_NODES:
        return pytree.tree_map(change, value)
    return change(value)


def tensors_of(result: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in a call's result, in order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if type(result) in VALUES or not (isinstance(result, (tuple, dict)) or type(result) in pytree.SUPPORTED_NODES):
        return ()
    if type(result) in (tuple, list) and all(isinstance(leaf, torch.Tensor) for leaf in result):
        return result
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in a call's arguments, in order."""
    found: list[torch.Tensor] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif type(one) not in VALUES:
            found += tensors_of(one)
    return found
