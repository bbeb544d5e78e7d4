"""Dataclasses that hold tensors, as arguments and results: torch looks into them once their class is registered with
its pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils import _pytree as pytree

from .tree import leaves


def look_into(value: Any) -> None:
    """Register the class of each dataclass instance in `value`, at any depth, unless its user has done so.

    Left alone, and so refused as any other object is: one with a field that its constructor does not take, which could
    not be made again from its fields.
    """
    while new := {type(leaf) for leaf in leaves(value) if dataclasses.is_dataclass(leaf) and _made_of_fields(leaf)}:
        for cls in new:
            pytree.register_dataclass(cls)


def _made_of_fields(leaf: Any) -> bool:
    return not isinstance(leaf, type) and all(field.init for field in dataclasses.fields(leaf))
