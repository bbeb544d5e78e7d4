"""Measures what a stage's forward leaves behind if everything is kept: outputs and saved tensors.

Saved tensors are held by autograd's graph alone, as in a step. A part of the graph that leads to no result (the norm of
a detached weight, a figure for the log) is freed before the forward ends, with its tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import NamedTuple

import torch

from ...tensors.saved_tensors import watch_saved
from ...tensors.stage import SavedKind
from ...tensors.storage import storage_key
from ...tensors.tree import flatten
from ..timing.harness import Run
from .allocator import AllocationLog, Allocator


class Holder:
    """Stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Saved(NamedTuple):
    """A tensor that autograd saved.

    Attributes:
        key: of its storage; another storage may have it by now.
        address: of its storage.
        holder: the graph's reference to the tensor.
    """

    key: int
    address: int
    shape: torch.Size
    dtype: torch.dtype
    holder: weakref.ref[Holder]

    @property
    def alive(self) -> bool:
        """Whether the graph still holds it."""
        return self.holder() is not None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor, if the graph still holds it."""
        holder = self.holder()
        return None if holder is None else holder.tensor


class Kept(NamedTuple):
    """A logged forward with everything kept.

    Attributes:
        saved: what autograd saved, in order.
        gathered: storages of saved parameters that may exist only while the stage runs (FSDP).
    """

    outputs: list[torch.Tensor]
    saved: list[Saved]
    gathered: set[int]
    log: AllocationLog

    @property
    def live_bytes(self) -> int:
        return sum(self.log.live().values())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The saved tensors that still exist."""
        return [one.tensor for one in self.saved if one.tensor is not None]

    def kinds(self, inputs: Collection[int]) -> tuple[SavedKind, ...]:
        """Return the kind of each saved tensor. inputs: storages of the stage's input."""
        taken = self.log.taken()

        def kind(one: Saved) -> SavedKind:
            if one.key in self.gathered:
                return SavedKind.RESIDENT
            if one.key in inputs:
                return SavedKind.INPUT
            return SavedKind.OWN if one.address in taken else SavedKind.RESIDENT

        return tuple(kind(one) for one in self.saved)

    def keys(self, inputs: Collection[int]) -> list[int | None]:
        """Return the storage of each saved tensor; None if it is freed, unless it was one of the `inputs`."""
        return [one.key if one.alive or one.key in inputs else None for one in self.saved]


def keep_everything(run: Run, leaves: list[torch.Tensor], allocator: Allocator) -> Kept:
    """Run the forward on `leaves`."""
    saved: list[Saved] = []
    gathered: set[int] = set()

    def keep(tensor: torch.Tensor) -> Holder:
        key = storage_key(tensor)
        holder = Holder(tensor.detach())
        saved.append(Saved(key, allocator.address(tensor), tensor.shape, tensor.dtype, weakref.ref(holder)))
        parameters = (p for module in run.stage.modules for p in module.parameters())
        if key in {storage_key(p) for p in parameters if isinstance(p, torch.nn.Parameter)}:  # others: functional_call
            gathered.add(key)
        return holder

    with watch_saved(keep):
        outputs, log = allocator.log(lambda: flatten(run.forward(leaves))[0])
    return Kept(outputs, saved, gathered, log.by_itself())
