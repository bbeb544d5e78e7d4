"""Calls whose results are never used: the model's own code makes them, but no measured stage does.

Replays leave them out. Such a call belongs to no stage if it reads a tensor that another stage made, or one that no
stage receives, since a replay would have to keep that tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import accumulate

from .tape import RecordedCall, Tape

SCALARS = 64  # bytes of the tensors that an operation makes of numbers
OUTSIDE = 0  # the stage of results that belong to all stages or to none, and are charged to no value


def put_in_stages(
    tape: Tape,
    calls: Sequence[RecordedCall],
    stage_of: dict[int, int],
    needed: Collection[int],
    outside: Collection[int],
    entering: Sequence[Set[int]],
) -> dict[int, int]:
    """Assign the calls that belong to no stage yet to the one that is open; return the stage in which each variable is
    made.

    Args:
        stage_of: by an operation's id; calls are added.
        needed: ids of operations whose results are used.
        outside: ids of operations before the stages.
        entering: for each stage, the variables that it receives.
    """
    made: dict[int, int] = {}
    open_stage = 1
    for op in calls:
        if id(op) not in outside:
            open_stage = stage_of.get(id(op), open_stage)
            given = entering[open_stage - 1]
            own = (made.get(n) == open_stage or (made.get(n) and n in given) or n in tape.inputs for n in op.reads)
            if id(op) in needed or all(own):
                stage_of[id(op)] = open_stage
        for n in op.made:
            made.setdefault(n, stage_of.get(id(op), OUTSIDE))
    return made


def beside_bytes(
    tape: Tape,
    calls: Sequence[RecordedCall],
    stage_of: Mapping[int, int],
    needed: Collection[int],
    last: Mapping[int, int],
    count: int,
) -> tuple[int, ...]:
    """Return, for each of `count` stages, the most bytes that unused results take in its forward.

    Args:
        stage_of, needed: as in `put_in_stages`.
        last: for each variable, the index of the call that uses it last.
    """
    levels = [0] * (len(calls) + 1)
    for first, end, nbytes in _spans(tape, calls, stage_of, needed, last):
        levels[first] += nbytes
        levels[min(end + 1, len(calls))] -= nbytes
    found, stage = [0] * count, 1
    for op, level in zip(calls, accumulate(levels), strict=False):
        stage = stage_of.get(id(op)) or stage
        within = 0
        if id(op) not in needed:
            touched = {tape.variables[n] for n in op.touched}
            within = sum(variable.nbytes for variable in touched) + sum(nbytes for _, nbytes in op.saves) + SCALARS
        found[stage - 1] = max(found[stage - 1], level + within)
    return tuple(found)


def _spans(
    tape: Tape,
    calls: Sequence[RecordedCall],
    stage_of: Mapping[int, int],
    needed: Collection[int],
    last: Mapping[int, int],
) -> Iterator[tuple[int, int, int]]:
    """Yield (first call, last call, bytes) for each storage that exists without being needed."""
    elsewhere = {tape.variables[n].storage for n in tape.inputs} | tape.held | {None}
    # the last call at which each storage exists that the model's own code releases
    released: dict[int | None, int] = {storage: k for op, k in with_calls(tape, calls) for storage in op.ends}
    begins: dict[int | None, int] = {}  # for a needed storage, after its last needed use
    ends: dict[int | None, int] = {}
    nbytes: dict[int | None, int] = {}
    stage = 1
    stages: dict[int | None, int] = {}
    for k, op in enumerate(calls):
        stage = stage_of.get(id(op)) or stage
        apart = id(op) not in needed and not stage_of.get(id(op))
        for n in op.touched:
            storage = tape.variables[n].storage
            nbytes[storage] = tape.variables[n].nbytes
            if id(op) in needed:
                begins[storage], stages[storage] = k + 1, stage
            else:
                begins.setdefault(storage, k)
            # the runtime does not hollow what no replay makes; the model's own code holds it
            end = released.get(storage, len(calls)) if apart and n in op.outputs else last.get(n, k)
            ends[storage] = max(ends.get(storage, 0), end)
        if apart:
            until = max((ends[tape.variables[n].storage] for n in op.made), default=k)
            yield from ((k, until, size) for storage, size in op.saves if storage not in elsewhere)
    places = {n: stage_of.get(id(op), 0) for n, op in enumerate(calls)}
    for storage, first in begins.items():
        end = ends[storage]
        crosses = storage in stages and places.get(end, 0) != stages[storage]  # charged to values
        if storage not in elsewhere and first <= end and not crosses:
            yield first, end, nbytes[storage]


def with_calls(tape: Tape, calls: Sequence[RecordedCall]) -> Iterator[tuple[RecordedCall, int]]:
    """Yield the operations, the last first, each with its index among `calls`; that of the next call if it is none."""
    index = {id(op): k for k, op in enumerate(calls)}
    k = len(calls)
    for op in reversed(tape.operations):
        k = index.get(id(op), k)
        yield op, k
