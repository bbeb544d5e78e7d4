"""The recipe of one form of a stage: which saved tensors are stored, and which operations run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .convolutions import Algorithms
from .storage import View

QUERIES = frozenset({torch.ops.prim.device.default})  # not counted as operations: fake tensors query their device so


class Stored(NamedTuple):
    """A stored result: a view of the storage in slot `slot`."""

    slot: int
    view: View


class Unread(NamedTuple):
    """A result whose content nobody reads."""

    view: View
    device: torch.device


class Argument(NamedTuple):
    """A result that is the tensor argument number `place` (an in-place operation)."""

    place: int


class Constant(NamedTuple):
    """A result that is not a tensor."""

    value: Any


Result = Stored | Unread | Argument | Constant


@dataclass(frozen=True)
class Recipe:
    """How ``F_sel`` makes one form of a stage, and how the redo before ``B`` completes it.

    kept: slots (positions of saved tensors) that ``F_sel`` stores. views: their views in their storages.
    stop: the number of saved tensors after which the redo ends.
    functions: the operations of the forward, in order.
    results: by position, the results of the operations that the redo skips; `single`: those that return no tuple.
    keeps: descriptions of what is stored, for reports.
    whole: whether the redo runs every operation up to its end, so that it needs no dispatch mode.
    algorithms: of convolutions in this form; None: by the user's flags.
    sized: whether the views are the same in every step; else the sizes differ, and each skipped operation is run on
        the meta device to find its results' views. made: a cache of these, by operation and arguments.
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
        """Whether everything is stored, as ``F_all`` does."""
        return self.stop == 0

    def stores(self, n: int, tensor: torch.Tensor) -> bool:
        """Whether this form stores `tensor` in slot `n`."""
        if n not in self.kept:
            return False
        own, view = View.of(tensor), self.views[n]
        if self.sized:
            return own == view
        kind = own.dtype, len(own.size), own.conj, own.neg
        return own.dense and kind == (view.dtype, len(view.size), view.conj, view.neg)

    @property
    def identity(self) -> tuple[tuple[int, ...], str]:
        """A key that identifies this form among those of its stage."""
        return tuple(sorted(self.kept)), "" if self.algorithms is None else self.algorithms.value
