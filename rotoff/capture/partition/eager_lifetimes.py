"""How long the plain model holds what it makes, as seen while its forward was recorded, compared with its stages.

A forward's local variables may outlive their last use, and it may compute unused results. What autograd saves stays
into the backward and is known when stages are measured; here are the storages that it does not save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from ...tensors.lifetimes import HeldElsewhere, Lifetimes, Span
from ..tape import RecordedCall, Tape


def lifetimes(
    tape: Tape, used: Collection[RecordedCall], moved: Collection[RecordedCall], place: Mapping[int, int], count: int
) -> list[Lifetimes]:
    """Return the lifetimes in each of `count` pieces.

    Args:
        used: operations whose results are used.
        moved: operations that no longer run where they do in the model.
        place: by an operation's id, the piece in which the model runs it; others follow those before them.
    """
    needed = {id(op) for op in used} - {id(op) for op in moved}
    pieces = list(accumulate((place.get(id(op), 0) for op in tape.operations), max))
    pieces = [min(piece, count - 1) for piece in pieces]
    leading, leads = _leading(tape), _leads(tape, {id(op) for op in used}, pieces)
    saved = {storage for op in tape.operations if id(op) in leading for storage, _ in op.saves}
    # a graph that leads to no result saves them as long as a variable holds its end
    saved_for_nothing = {storage for op in tape.operations for storage, _ in op.saves} - saved
    last = {
        storage: leads[id(op)]
        for op in sorted(tape.operations, key=lambda op: leads[id(op)])
        for storage, _ in op.saves
    }
    made: dict[int, tuple[int, int]] = {}  # storage -> position, bytes
    begins: dict[int, int] = {}  # from where it is not needed: after its last use, or where an unused one is made
    ends: dict[int, int] = {}
    batch = {tape.variables[n].storage for n in tape.inputs}
    elsewhere = batch | saved | tape.held
    held: dict[int, list[HeldElsewhere]] = {}
    left = set(tape.held)
    for position, op in enumerate(tape.operations):
        for variable in map(tape.variables.__getitem__, op.made):
            if variable.storage in left:
                left.remove(variable.storage)
                one = HeldElsewhere(variable.storage, variable.nbytes, variable.storage in saved)
                held.setdefault(pieces[position], []).append(one)
        ends.update((storage, position) for storage in op.ends if storage not in saved_for_nothing)
        for n in set(op.touched):
            variable = tape.variables[n]
            if variable.storage is None or variable.storage in elsewhere:
                continue
            if made.setdefault(variable.storage, (position, variable.nbytes))[0] == position:
                begins[variable.storage] = position
            if id(op) in needed:
                begins[variable.storage] = position + 1
        for storage, nbytes in op.saves if id(op) not in leading else ():
            if storage in saved_for_nothing and storage not in made:
                made[storage] = position, nbytes
                begins[storage] = position
    spans: list[list[Span]] = [[] for _ in range(count)]
    for storage, (position, nbytes) in made.items():
        spans[pieces[position]].append(Span(storage, nbytes, begins[storage], ends.get(storage), last.get(storage, -1)))
    going: list[set[int]] = [set() for _ in range(count)]
    for storage, position in ends.items():
        going[pieces[position]].add(storage)
    rows = enumerate(zip(going, spans, strict=True))
    return [Lifetimes(frozenset(gone), tuple(own), n, tuple(held.get(n, ()))) for n, (gone, own) in rows]


def _leading(tape: Tape) -> set[int]:
    """Return the ids of the operations on which the model's result depends."""
    wanted = set(tape.result_variables())
    found = set()
    for op in reversed(tape.operations):
        if op.writes or op.writes_owned or not wanted.isdisjoint(op.made):
            found.add(id(op))
            wanted.update(op.reads)
    return found


def _leads(tape: Tape, used: Collection[int], pieces: Sequence[int]) -> dict[int, int]:
    """Return, for each operation (by id), the last piece in which an operation of `used` reads a tensor whose graph
    contains it; -1 if none does.

    An operation of an unused result is also in `used` if it draws random numbers.
    """
    # the last piece that reads a variable, or a tensor whose graph contains that of the variable
    read: dict[int, int] = {}
    found = {}
    for op, piece in zip(reversed(tape.operations), reversed(pieces), strict=True):
        holding = [n for n in op.made if tape.variables[n].needs_grad]
        found[id(op)] = leads = max((read.get(n, -1) for n in holding), default=-1)
        if id(op) in used:
            for n in op.reads:
                read[n] = max(read.get(n, -1), piece, leads)
    return found
