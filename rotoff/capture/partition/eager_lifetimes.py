"""How long the plain model holds what it makes, seen while its forward was recorded: longer than its stages do, or less
long.

A forward's local variables may outlive their last use, and it may compute what nobody uses. What autograd saves stays
into the backward, and is known when stages are measured; here are the storages that it does not save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from ...tensors.lifetimes import HeldElsewhere, Lifetimes, Span
from ..tape import Operation, Tape


def lifetimes(
    tape: Tape, used: Collection[Operation], moved: Collection[Operation], place: Mapping[int, int], count: int
) -> list[Lifetimes]:
    """Of each of `count` pieces.

    used: the operations that somebody needs the outcome of. moved: those that no longer run where they do in the model.
    place: of an operation (its id), the piece that ends no sooner than it does in the model; the others follow those
    before them.
    """
    needed = {id(op) for op in used} - {id(op) for op in moved}
    pieces = list(accumulate((place.get(id(op), 0) for op in tape.operations), max))
    pieces = [min(piece, count - 1) for piece in pieces]
    leading, leads = _leading(tape), _leads(tape, {id(op) for op in used}, pieces)
    saved = {storage for op in tape.operations if id(op) in leading for storage, _ in op.saves}
    # a graph that leads to nothing saves them for as long as a variable holds its end
    saved_for_nothing = {storage for op in tape.operations for storage, _ in op.saves} - saved
    last = {
        storage: leads[id(op)]
        for op in sorted(tape.operations, key=lambda op: leads[id(op)])
        for storage, _ in op.saves
    }
    made: dict[int, tuple[int, int]] = {}  # storage -> position, bytes
    begins: dict[int, int] = {}  # where it is in the way: made for nothing here, or past its last use
    ends: dict[int, int] = {}
    batch = {tape.variables[n].storage for n in tape.inputs}
    elsewhere = batch | saved | tape.held
    held: dict[int, list[HeldElsewhere]] = {}
    left = set(tape.held)
    for position, op in enumerate(tape.operations):
        for variable in (tape.variables[n] for n in op.outputs if n is not None):
            if variable.storage in left:
                left.remove(variable.storage)
                one = HeldElsewhere(variable.storage, variable.nbytes, variable.storage in saved)
                held.setdefault(pieces[position], []).append(one)
        ends.update((storage, position) for storage in op.ends if storage not in saved_for_nothing)
        for n in {*op.reads, *(n for n in op.outputs if n is not None)}:
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
    """The operations (their ids) on which what the model returns depends."""
    wanted = set(tape.result_variables())
    found = set()
    for op in reversed(tape.operations):
        if op.writes or op.writes_owned or not wanted.isdisjoint(n for n in op.outputs if n is not None):
            found.add(id(op))
            wanted.update(op.reads)
    return found


def _leads(tape: Tape, used: Collection[int], pieces: Sequence[int]) -> dict[int, int]:
    """Of each operation (its id) the last piece in which something `used` reads a tensor that holds its graph, -1 where
    nothing does.

    What is computed for nothing is used all the same where random numbers are drawn on the way.
    """
    # the last piece that reads a variable, or something whose graph holds that of the variable
    read: dict[int, int] = {}
    found = {}
    for op, piece in zip(reversed(tape.operations), reversed(pieces), strict=True):
        holding = [n for n in op.outputs if n is not None and tape.variables[n].needs_grad]
        found[id(op)] = leads = max((read.get(n, -1) for n in holding), default=-1)
        if id(op) in used:
            for n in op.reads:
                read[n] = max(read.get(n, -1), piece, leads)
    return found
