"""Merges the tapes of forwards with random branches: every operation that any of them makes, once.

A model that skips layers at random (LayerDrop) rarely does the same twice. A plan for all of its layers serves each of
those forwards: a stage without calls passes its input on, and takes no more bytes than planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .places import is_exact
from .tape import RecordedCall, Ref, Tape, substitute


def union(one: Tape, other: Tape, order: Mapping[str, int]) -> Tape | None:
    """Return a tape with the operations of both; None if those that they share have another order, or the results
    differ.

    Args:
        order: the rank of each module in the model, by name. Between two shared operations, those of the module that
            comes first in the model come first.
    """
    if len(one.inputs) != len(other.inputs) or one.attributes != other.attributes:
        return None
    pairs = _aligned(one, other)
    if pairs is None:
        return None
    return _Union(one, other).made(_merged(one, other, pairs, order))


Pair = tuple[int | None, int | None]  # the index of an operation in each tape


def _aligned(one: Tape, other: Tape) -> list[tuple[int, int]] | None:
    """Return the pairs of indices of the operations that both have, in order."""
    known = {key: i for i, op in reversed(list(enumerate(one.operations))) for key in op.keys}
    same = dict(zip(other.inputs, one.inputs, strict=True))
    pairs, last = [], -1
    for j, op in enumerate(other.operations):
        for key in op.keys:
            i = known.get(key, -1)
            mine = one.operations[i]
            if i <= last or len(mine.outputs) != len(op.outputs):
                continue
            if is_exact(key) or [same.get(n) for n in op.reads] == list(mine.reads):
                pairs.append((i, j))
                same.update(
                    (n, m) for n, m in zip(op.outputs, mine.outputs, strict=True) if n is not None and m is not None
                )
                last = i
                break
    return pairs or None


def _merged(one: Tape, other: Tape, pairs: list[tuple[int, int]], order: Mapping[str, int]) -> Iterator[Pair]:
    def rank(op: RecordedCall) -> list[tuple[int, int]]:
        return [(order.get(name, 0), call) for name, call in op.place]

    i = j = 0
    for shared_i, shared_j in [*pairs, (len(one.operations), len(other.operations))]:
        while i < shared_i or j < shared_j:
            mine = j >= shared_j
            if i < shared_i and j < shared_j:
                a, b = ([at for at, _ in rank(side.operations[n])] for side, n in ((one, i), (other, j)))
                mine = a <= b
            if mine:
                yield i, None
                i += 1
            else:
                if other.operations[j].makes:
                    yield None, j
                j += 1
        if shared_i < len(one.operations):
            yield shared_i, shared_j
        i, j = shared_i + 1, shared_j + 1


class _Side:
    """One of the two tapes.

    Attributes:
        variables, storages: its numbers and those of the union.
        position: of the next operation.
        last: the last use of each variable.
        calls: how many of the operations so far make or change tensors.
        entered: the calls of modules to come, the next one last.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.variables: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.position = 0
        self.last = {n: k for k, op in enumerate(tape.operations) for n in op.touched}
        self.last.update((n, len(tape.operations)) for n in tape.result_variables())
        self.calls = 0
        self.entered = [(k, entry) for entry, k in reversed(tape.entries.items())]

    def alive(self) -> list[int]:
        """Return the variables that exist and will be used."""
        return [n for n in self.variables if self.last.get(n, -1) >= self.position]


class _Union:
    def __init__(self, one: Tape, other: Tape) -> None:
        self._sides = _Side(one), _Side(other)
        self._tape = replace(one, inputs=[], variables=[], operations=[], result=[], entries={}, inner={}, random=True)
        self._tape.varying, self._tape.opaque = one.varying | other.varying, one.opaque | other.opaque
        self._tape.generators = [*one.generators, *other.generators]
        self._tape.tables = list({id(t): t for t in (*one.tables, *other.tables)}.values())
        self._storages = 0
        self._calls = 0  # number of operations that make or change tensors

    def made(self, steps: Iterator[Pair]) -> Tape:
        one, other = self._sides
        for n, m in zip(one.tape.inputs, other.tape.inputs, strict=True):
            self._tape.inputs.append(self._new([(one, n), (other, m)]))
        alone: _Side | None = None  # the tape that made all operations since the last shared one
        for step in steps:
            using = [(side, n) for side, n in zip(self._sides, step, strict=True) if n is not None]
            now = using[0][0] if len(using) == 1 else None
            if alone is not None and now is not alone:
                self._hand_on(alone)
            alone = now
            self._add(using)
        if alone is not None:
            self._hand_on(alone)
        self._tape.held = frozenset(self._storage(side, s) for side in self._sides for s in side.tape.held)
        self._tape.changed = one.tape.changed | other.tape.changed
        self._tape.changed_bytes = max(one.tape.changed_bytes, other.tape.changed_bytes)
        kept, more = one.tape.casts, other.tape.casts
        self._tape.casts, self._tape.region_ends = {c: kept.get(c, True) and more.get(c, True) for c in kept | more}, ()
        self._tape.result = substitute(one.tape.result, lambda leaf: self._renamed(one, leaf))
        return self._tape

    def _add(self, using: list[tuple[_Side, int]]) -> None:
        for side, n in using:
            makes = side.tape.operations[n].makes
            while makes and side.entered and side.entered[-1][0] <= side.calls:
                self._tape.entries.setdefault(side.entered.pop()[1], self._calls)
            side.position = n + 1
            side.calls += makes
        every = [(each, each.tape.operations[k]) for each, k in using]
        side, op = every[0]
        inner = tuple(self._as_one([(side, one)]) for one in side.tape.inner.get(id(op), ()))
        op = self._as_one(every)
        if inner:
            self._tape.inner[id(op)] = inner
        self._calls += op.makes
        self._tape.operations.append(op)

    def _as_one(self, every: list[tuple[_Side, RecordedCall]]) -> RecordedCall:
        """Return the operation that stands for equal ones of both tapes."""
        side, op = every[0]
        args, kwargs = substitute((op.args, op.kwargs), lambda leaf: self._renamed(side, leaf))
        reads = dict.fromkeys(side.variables[n] for n in op.reads)
        outputs = []
        for place in range(len(op.outputs)):
            mine = [(each, number) for each, one in every if (number := one.outputs[place]) is not None]
            outputs.append(self._new(mine) if mine else None)
        return replace(
            op,
            args=args,
            kwargs=kwargs,
            outputs=tuple(outputs),
            reads=tuple(reads),
            writes=frozenset(self._storage(side, s) for s in op.writes),
            saves=tuple((self._storage(side, s), nbytes) for s, nbytes in op.saves),
            ends=tuple(
                dict.fromkeys(self._storage(each, s) for each, one in every for s in one.ends if s in each.storages)
            ),
            keys=tuple(dict.fromkeys(key for _, one in every for key in one.keys)),
        )

    def _new(self, numbers: list[tuple[_Side, int]]) -> int:
        """Return the union's variable for the same variable of both tapes."""
        side, n = numbers[0]
        if (found := side.variables.get(n)) is None:
            found = len(self._tape.variables)
            variable = side.tape.variables[n]
            storage = None if variable.storage is None else self._storage(side, variable.storage)
            needs = any(each.tape.variables[m].needs_grad for each, m in numbers)
            self._tape.variables.append(variable._replace(storage=storage, needs_grad=needs))
        for each, m in numbers:
            self._stands_for(each, m, found)
        return found

    def _stands_for(self, side: _Side, n: int, number: int) -> None:
        side.variables[n] = number
        mine, storage = side.tape.variables[n].storage, self._tape.variables[number].storage
        if mine is not None and storage is not None:
            side.storages[mine] = storage

    def _storage(self, side: _Side, storage: int) -> int:
        if storage not in side.storages:
            side.storages[storage] = self._storages
            self._storages += 1
        return side.storages[storage]

    def _hand_on(self, side: _Side) -> None:
        """Let the results of operations that only one tape has replace the variables of the other."""
        other = self._sides[side is self._sides[0]]
        mine = {side.variables[n]: n for n in side.alive()}
        theirs = {other.variables[n]: n for n in other.alive()}
        fresh = [number for number in mine if number not in theirs]
        for number, n in theirs.items():
            if number in mine:
                continue
            nbytes = other.tape.variables[n].nbytes
            found = next((one for one in fresh if self._tape.variables[one].nbytes == nbytes), None)
            if found is not None:
                fresh.remove(found)
                self._stands_for(other, n, found)

    @staticmethod
    def _renamed(side: _Side, leaf: Any) -> Any:
        return Ref(side.variables[leaf.variable]) if isinstance(leaf, Ref) else leaf
