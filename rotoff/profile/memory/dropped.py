"""Finds what stays of a stage's forward when all outputs and saved tensors are freed.

An attribute of ``ctx`` in a custom Function, a hook's closure, a module's attribute or a global may hold a tensor. Such
bytes exist from the stage's first run to the end of the step, whatever the plan drops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...capture.partition.segment import results_noted
from ...tensors.saved_tensors import watch_saved
from ...tensors.storage import local, storage_key, uses_of
from ...tensors.tree import flatten
from ..timing.harness import Run, get_edges
from .allocator import AllocationLog, Allocator


class Dropped(NamedTuple):
    """A forward that keeps its outputs alone.

    Attributes:
        outputs: detached.
        staying: bytes made in it that stay when the outputs are freed, too.
        held_outputs, held_inputs: the positions of those that stay. Results of operations in a recorded stage are left
            out: capture saw what holds them when the model's own code ran (`capture.partition.eager_lifetimes`).
    """

    outputs: list[torch.Tensor]
    log: AllocationLog
    staying: int
    held_outputs: frozenset[int]
    held_inputs: frozenset[int]


def dropped(run: Run, allocator: Allocator, look: Callable[[torch.Tensor], None]) -> Dropped:
    """Run the forward. look: called with each tensor that autograd would save."""
    leaves = run.leaves()
    uses = [uses_of(t) for t in leaves]
    given = [t.view_as(t) if t.requires_grad else t.detach() for t in leaves]
    results: list[tuple[int, StorageWeakRef]] = []
    graph = []

    def forward() -> list[torch.Tensor]:
        outputs = flatten(run.forward(given))[0]
        given.clear()
        graph.extend(get_edges(outputs))
        return [t.detach() for t in outputs]

    with watch_saved(look), results_noted(lambda t: results.append(_place(allocator, t))):
        outputs, log = allocator.log(forward)
    log = allocator.as_requested(log.by_itself(), outputs)
    keys = [storage_key(t) for t in outputs]
    passed = {storage_key(t) for t in leaves}.intersection(keys)
    there = frozenset(
        n
        for n, (t, key) in enumerate(zip(outputs, keys, strict=True))
        if not (run.last or results or key in passed) and uses_of(t) > keys.count(key)
    )
    freed = {allocator.address(t) for n, t in enumerate(outputs) if n not in there}
    freed |= {address for address, storage in results if not storage.expired()}
    staying = sum(size for address, size in log.live().items() if address not in freed)
    inputs = frozenset(
        n
        for n, (t, before) in enumerate(zip(leaves, uses, strict=True))
        if not results and uses_of(t) > before + keys.count(storage_key(t))
    )
    return Dropped(outputs, log, staying, there, inputs)


def _place(allocator: Allocator, tensor: torch.Tensor) -> tuple[int, StorageWeakRef]:
    return allocator.address(tensor), StorageWeakRef(local(tensor).untyped_storage())
