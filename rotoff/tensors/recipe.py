"""How one form of a stage is made and redone: what is kept, and which operations run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .convolutions import Algorithms
from .storage import View

QUERIES = frozenset({torch.ops.prim.device.default})  # no operations: fake tensors ask for their device in this way


class Stored(NamedTuple):
    """A result that is stored, as a view of the storage that slot `slot` keeps."""

    slot: int
    view: View


class Unread(NamedTuple):
    """A result whose content nobody reads."""

    view: View
    device: torch.device


class Argument(NamedTuple):
    """The tensor argument number `place` (an operation in place)."""

    place: int


class Constant(NamedTuple):
    """A result that is no tensor."""

    value: Any


Result = Stored | Unread | Argument | Constant


@dataclass(frozen=True)
class Recipe:
    """How one form of a stage is made and redone.

    kept: slots (numbers of tensors that autograd saves) that ``F_sel`` stores. views: how they lie in their storages.
    stop: the redo ends when this many tensors have been saved. functions: the operations of the forward, in order.
    results: of the operations that do not run, by position; a sole result is no tuple's where it is in `single`. keeps:
    what is stored, for people. whole: every operation runs up to the end of the redo, so that nobody has to look at
    them one by one. algorithms: by which convolutions run in this form, where not by those that the flags pick. sized:
    whether the views are those of every step; else steps differ in sizes, and the operations that do not run tell what
    they would make. made: what they have told so far, by operation and arguments.
    """

    kept: frozenset[int]
    views: Mapping[int, View] = field(compare=False)
    stop: int
    functions: tuple[Any, ...]
    results: Mapping[int, tuple[Result, ...]] = field(compare=False)
    single: frozenset[int] = frozenset()
    keeps: tuple[str, ...] = ()
    whole: bool = False
    algorithms: Algorithms | None = None
    sized: bool = True
    made: dict[Any, tuple[View | None, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def complete(self) -> bool:
        """Whether all is stored, as ``F_all`` does, and nothing redone."""
        return self.stop == 0

    def stores(self, n: int, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, in slot `n`, is what this form keeps there."""
        if n not in self.kept:
            return False
        own, view = View.of(tensor), self.views[n]
        if self.sized:
            return own == view
        return own.dense and (own.dtype, len(own.size), own.conj, own.neg) == (
            view.dtype,
            len(view.size),
            view.conj,
            view.neg,
        )

    @property
    def identity(self) -> tuple[tuple[int, ...], str]:
        """What tells this form of a stage from its others."""
        return tuple(sorted(self.kept)), "" if self.algorithms is None else self.algorithms.value
