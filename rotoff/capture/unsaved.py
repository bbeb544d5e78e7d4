"""Merges stages if nothing keeps the value between them, because the machine charges every output to the stage's ā.

Plain autograd frees an output that neither the backward of its own stage nor that of the next one needs, such as a
linear layer's before a ReLU. A merged stage holds it only while it runs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.buffers import preserved
from ..tensors.saved_tensors import watch_saved
from ..tensors.stage import StageModule, stage_inputs
from ..tensors.storage import storage_key
from ..tensors.tree import flatten
from .backward_roots import without_backward


@dataclass(frozen=True)
class Group:
    """Stages that may be merged, and their bytes.

    Attributes:
        input_bytes, output_bytes: of the values around them.
        kept_bytes: of ā.
        unsaved_bytes: of the output that neither the last of them nor the next stage saves, and nothing else holds.
        differentiable: whether an output needs a gradient.
        inner_bytes: of the largest value between two of them.
        part_bytes: the largest `need_bytes` of one of them alone.
    """

    stage: StageModule
    input_bytes: int
    output_bytes: int
    kept_bytes: int
    unsaved_bytes: int = 0
    differentiable: bool = True
    inner_bytes: int = 0
    part_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        """What its ``B`` needs: the input, ā, and two gradients, one of which may be of a value within."""
        return self.input_bytes + self.kept_bytes + self.output_bytes + max(self.input_bytes, self.inner_bytes)

    def merged(self, following: Group) -> Group:
        return Group(
            stage=self.stage.merged(following.stage),
            input_bytes=self.input_bytes,
            output_bytes=following.output_bytes,
            kept_bytes=self.kept_bytes + following.kept_bytes - self.unsaved_bytes,
            unsaved_bytes=following.unsaved_bytes,
            differentiable=following.differentiable,
            inner_bytes=max(self.inner_bytes, self.output_bytes, following.inner_bytes),
            part_bytes=max(part.part_bytes or part.need_bytes for part in (self, following)),
        )


class _Storage(NamedTuple):
    watch: StorageWeakRef  # while it exists, no other storage gets the same key
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        return cls(StorageWeakRef(storage), storage.nbytes())


def merge_unsaved(stages: Sequence[StageModule], value: Any, device: torch.device) -> list[StageModule]:
    """Merge each stage with the one before it if the output between them is not needed.

    Args:
        stages: in order, each of which makes something (`aliasing.merge_aliases`).
        value: the sample input, which stays unchanged; each stage runs on it once, and its graph is freed before the
            next.
    """
    return [group.stage for group in merge_groups(_look_at(stages, value, device))]


def merge_groups(stages: Sequence[Group]) -> list[Group]:
    """Merge neighbours if nothing saves the output of the first.

    Larger stages leave a plan fewer choices, and could raise the smallest limit. So a merged stage must need no more
    bytes in its ``B`` than one of its parts does. That keeps stages apart that save much, and those around a value that
    is smaller than its neighbours, which is a good one to recompute from.
    """
    groups: list[Group] = []
    for stage in stages:
        before = groups[-1] if groups else None
        if before is not None and before.unsaved_bytes and before.differentiable and stage.differentiable:
            both = before.merged(stage)
            if both.need_bytes <= both.part_bytes:
                groups[-1] = both
                continue
        groups.append(stage)
    return groups


def _look_at(stages: Sequence[StageModule], value: Any, device: torch.device) -> list[Group]:
    """Run `stages` one by one; return what each keeps and leaves unused."""
    found: list[Group] = []
    made: dict[int, _Storage] = {}  # by the stage before
    saved: set[int] = set()
    given = {storage_key(t) for t in flatten(value)[0]}  # the caller holds them
    for stage in stages:
        saved_before, made_before = saved, made
        value, group, made, saved = _look(stage, value, device)
        if found:
            free = [s for key, s in made_before.items() if key not in saved_before | saved | made.keys() | given]
            if not all(s.watch.expired() for s in free):
                gc.collect()  # otherwise the result would depend on when it runs, and processes could differ
            found[-1] = replace(found[-1], unsaved_bytes=_freed(free))
        found.append(group)
    return found


def _look(stage: StageModule, value: Any, device: torch.device) -> tuple[Any, Group, dict[int, _Storage], set[int]]:
    """Run `stage`; return its detached output, its group, the output's storages, and the keys of saved storages."""
    saved: dict[int, _Storage] = {}

    def note(tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in saved:
            saved[key] = _Storage.of(tensor)

    given, rebuild = flatten(value)
    leaves = stage_inputs(given, [t.requires_grad for t in given])
    with preserved(list(stage.buffers()), device), torch.enable_grad(), watch_saved(note):
        outputs, rebuild_output = flatten(stage.run(rebuild(leaves)))
    for n in without_backward(stage):  # the caller may hold them or not
        outputs[n] = outputs[n].new_empty(0)
    made = {storage_key(t): _Storage.of(t) for t in outputs}
    result = [t.detach().requires_grad_(t.requires_grad) for t in outputs]
    del outputs  # frees the graph
    entering = sum({storage_key(t): t.untyped_storage().nbytes() for t in given}.values())
    leaving = sum(s.nbytes for s in made.values())
    kept = leaving + _freed(s for key, s in saved.items() if key not in made)
    group = Group(stage, entering, leaving, kept, differentiable=any(t.requires_grad for t in result))
    return rebuild_output(result), group, made, set(saved)


def _freed(storages: Iterable[_Storage]) -> int:
    """Return the bytes of the storages that nothing holds now; the rest existed before, such as parameters and the
    input."""
    return sum(s.nbytes for s in storages if s.watch.expired())
