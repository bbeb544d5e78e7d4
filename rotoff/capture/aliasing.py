"""Merges stages until each one makes something, because the machine charges every byte to the value that keeps it
alive.

A stage that only passes its input on, as a view or unchanged, or that changes it in place, is merged with the stage
before it. A stage that also makes something may pass bytes on. Those that exist throughout the step (the batch's, such
as a mask that all stages pass on, and a module's own tables) cost nothing; a skip connection is charged to every value
that carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.buffers import preserved
from ..tensors.stage import Copy, StageModule
from ..tensors.storage import copied, storage_key, version_of
from ..tensors.tree import flatten
from .unrepeatable import refusing


def merge_aliases(stages: Sequence[StageModule], value: Any, device: torch.device) -> list[StageModule]:
    """Merge each stage whose output shares bytes with its input, or that changes its input, with the one before it.

    A first stage that only passes the batch on is merged with the next; one that changes the batch works on a copy. If
    a later stage changes the batch, or another stage's table, all stages up to it are one.

    Args:
        stages: in order.
        value: the sample input, which stays unchanged; the stages run on it without gradients.
    """
    groups = _merged(stages, value, device, False)
    return groups if groups is not None else _merged(stages, value, device, True) or []


def _merged(stages: Sequence[StageModule], value: Any, device: torch.device, tables: bool) -> list[StageModule] | None:
    """Return the merged stages; None if a stage changes its input, which may be another stage's own table, unless
    `tables` says to run each stage with several outputs twice, so that these are known."""
    unsure = False
    groups: list[StageModule] = []
    first_aliases = False  # whether the first group's output is the batch itself
    given, rebuild = flatten(value)
    with torch.no_grad():
        value = rebuild([copied(t) for t in given])  # a stage may change it
        # while a weak reference exists, no other storage gets the same key
        watches = {storage_key(t): StorageWeakRef(t.untyped_storage()) for t in flatten(value)[0]}
        lasting = set(watches)
        for stage in stages:
            source, value = value, None
            inputs = [(t, version_of(t)) for t in flatten(source)[0]]
            keys = {storage_key(t) for t, _ in inputs}
            value = _run(stage, source, device)
            outputs = flatten(value)[0]
            changed = {storage_key(t) for t, version in inputs if version_of(t) != version}
            aliases = all(storage_key(t) in keys for t in outputs)
            at_start = not groups or first_aliases
            if changed and at_start:
                stage, aliases = replace(stage, modules=(Copy(), *stage.modules)), False
                lasting -= keys
            elif changed and unsure:
                return None
            elif changed & lasting:
                for before in reversed(groups):
                    stage = before.merged(stage)
                groups, aliases, lasting = [], False, lasting - changed
                if not changed.isdisjoint(watches):
                    stage, lasting = replace(stage, modules=(Copy(), *stage.modules)), lasting - set(watches)
            elif not changed and len(outputs) > 1 and not tables:
                unsure = True
            elif not changed and len(outputs) > 1:
                again = flatten(_run(stage, source, device))[0]
                lasting |= {storage_key(t) for t in outputs} & {storage_key(t) for t in again} - keys
                del again
            if groups and (changed or aliases or first_aliases):
                groups[-1] = groups[-1].merged(stage)
                first_aliases = first_aliases and aliases
            else:
                groups.append(stage)
                first_aliases = len(groups) == 1 and aliases
    return groups


def _run(stage: StageModule, value: Any, device: torch.device) -> Any:
    with preserved(list(stage.buffers()), device), refusing(stage):
        return stage.run(value)
