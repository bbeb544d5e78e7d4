"""Calls whose outcome nobody needs: the model's own code makes them all the same, and no stage that is measured does.

A replay leaves them out. One that reads what another stage has made, or what no stage is given, belongs to none: its
replay would have to keep that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import accumulate

from .tape import Operation, Tape

SCALARS = 64  # bytes of numbers that an operation makes tensors of
OUTSIDE = 0  # in place of a stage: what is made for all stages or for none, and is charged to no value


def put_in_stages(
    tape: Tape,
    calls: Sequence[Operation],
    stage_of: dict[int, int],
    needed: Collection[int],
    outside: Collection[int],
    entering: Sequence[Set[int]],
) -> dict[int, int]:
    """Put the calls that belong to no stage yet into the one that is open; returns where each variable is made.

    Args:
        stage_of: of an operation (its id). needed, outside: the operations (their ids) that somebody needs, and those
            that come before the stages. entering: of each stage, the variables that it is given.
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
        for n in op.outputs:
            if n is not None:
                made.setdefault(n, stage_of.get(id(op), OUTSIDE))
    return made


def beside_bytes(
    tape: Tape,
    calls: Sequence[Operation],
    stage_of: Mapping[int, int],
    needed: Collection[int],
    last: Mapping[int, int],
    count: int,
) -> tuple[int, ...]:
    """Of each of `count` stages, the most that is there in its forward since something is computed for nothing.

    Args:
        stage_of, needed: as of `put_in_stages`. last: of a variable, the number of the call that uses it last.
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
            touched = {tape.variables[n] for n in (*op.reads, *op.outputs) if n is not None}
            within = sum(variable.nbytes for variable in touched) + sum(nbytes for _, nbytes in op.saves) + SCALARS
        found[stage - 1] = max(found[stage - 1], level + within)
    return tuple(found)


def _spans(
    tape: Tape,
    calls: Sequence[Operation],
    stage_of: Mapping[int, int],
    needed: Collection[int],
    last: Mapping[int, int],
) -> Iterator[tuple[int, int, int]]:
    """Of each storage the first and the last call with which it is there for nothing, and its bytes."""
    elsewhere = {tape.variables[n].storage for n in tape.inputs} | tape.held | {None}
    gone = _gone(tape, calls)
    begins: dict[int | None, int] = {}  # of those that are needed, after their last use that is
    ends: dict[int | None, int] = {}
    nbytes: dict[int | None, int] = {}
    stage = 1
    stages: dict[int | None, int] = {}
    for k, op in enumerate(calls):
        stage = stage_of.get(id(op)) or stage
        apart = id(op) not in needed and not stage_of.get(id(op))
        for n in (*op.reads, *(n for n in op.outputs if n is not None)):
            storage = tape.variables[n].storage
            nbytes[storage] = tape.variables[n].nbytes
            if id(op) in needed:
                begins[storage], stages[storage] = k + 1, stage
            else:
                begins.setdefault(storage, k)
            # what no replay makes is not taken from the model's own code
            end = gone.get(storage, len(calls)) if apart and n in op.outputs else last.get(n, k)
            ends[storage] = max(ends.get(storage, 0), end)
        if apart:
            until = max((ends[tape.variables[n].storage] for n in op.outputs if n is not None), default=k)
            yield from ((k, until, size) for storage, size in op.saves if storage not in elsewhere)
    places = {n: stage_of.get(id(op), 0) for n, op in enumerate(calls)}
    for storage, first in begins.items():
        end = ends[storage]
        handed_on = storage in stages and places.get(end, 0) != stages[storage]  # and so charged to values
        if storage not in elsewhere and first <= end and not handed_on:
            yield first, end, nbytes[storage]


def _gone(tape: Tape, calls: Sequence[Operation]) -> dict[int | None, int]:
    """Of a storage that the model's own code lets go of, the last call with which it is there."""
    place = {id(op): k for k, op in enumerate(calls)}
    found: dict[int | None, int] = {}
    following = len(calls)
    for op in reversed(tape.operations):
        following = place.get(id(op), following)
        found.update(dict.fromkeys(op.ends, following))
    return found
