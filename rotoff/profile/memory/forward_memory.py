"""What a stage's forward leaves behind where everything is kept: outputs, and what autograd saves.

Autograd's graph alone holds what it saves, as it does in a step. A part of the graph that nothing leads to any more (a
norm of a weight that is detached, a figure for the log) goes before the forward ends, and its tensors with it.
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
    """What stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Saved(NamedTuple):
    """A tensor as autograd saved it. key: of its storage, which another may have got since; address: where that was."""

    key: int
    address: int
    shape: torch.Size
    dtype: torch.dtype
    holder: weakref.ref[Holder]

    @property
    def alive(self) -> bool:
        """Whether the graph still has it."""
        return self.holder() is not None

    @property
    def tensor(self) -> torch.Tensor | None:
        """It, where the graph still has it."""
        holder = self.holder()
        return None if holder is None else holder.tensor


class Kept(NamedTuple):
    """A recorded forward with everything kept. saved: what autograd saved, in order. gathered: which storages of those
    are parameters', that may be there only while the stage runs (FSDP)."""

    outputs: list[torch.Tensor]
    saved: list[Saved]
    gathered: set[int]
    log: AllocationLog

    @property
    def live_bytes(self) -> int:
        return sum(self.log.live().values())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The saved ones that are still there."""
        return [one.tensor for one in self.saved if one.tensor is not None]

    def kinds(self, inputs: Collection[int]) -> tuple[SavedKind, ...]:
        """Whose bytes each saved tensor is. inputs: storages of the stage's input."""
        taken = self.log.taken()

        def kind(one: Saved) -> SavedKind:
            if one.key in self.gathered:
                return SavedKind.RESIDENT
            if one.key in inputs:
                return SavedKind.INPUT
            return SavedKind.OWN if one.address in taken else SavedKind.RESIDENT

        return tuple(kind(one) for one in self.saved)

    def keys(self, inputs: Collection[int]) -> list[int | None]:
        """The storage of each saved tensor; None for one that is gone, unless it was one of the `inputs`."""
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
