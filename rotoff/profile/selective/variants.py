"""Chooses which saved tensors of a stage to store and which to recompute, from the log of one forward.

A form keeps some of the storages that autograd saves; the stage's outputs exist anyway. What the redo runs follows from
the reads and writes of the operations: those that write a storage which is neither kept nor given, and in turn what
those read. Its cost is the sum of their times. The walk begins with everything kept, and drops the storage with the
fewest seconds per byte next, until nothing is left. The lower convex hull of the visited points in (bytes, seconds)
holds the good forms; at most `MAX_FORMS` of them are taken, those that the hull would miss most.

Some operations need care. One that writes a tensor which existed before (a buffer), or returns something that Python
may read, runs in every redo. A storage that is read before its last writer has run is not stored. After a random draw
that was left out, nothing draws. A stage gets no forms at all if it communicates, if it contains compiled modules (a
dispatch mode would run them uncompiled), or if something writes past the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...capture.operations import Leaf, Operation, OperationLog
from ...errors import OptionError
from ...tensors.recipe import Argument, Constant, Recipe, Result, Stored, Unread
from ...tensors.stage import SavedKind, StageModule

MAX_FORMS = 4
# operations that read only the shape of their argument
LIKE = frozenset(
    {f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
    | {f"new_{what}" for what in ("empty", "empty_strided", "zeros", "ones", "full")}
)
MASKED = frozenset({"native_dropout"})  # operations whose first result alone depends on the values of their argument
FormPolicy = Callable[[Operation], bool | None]  # True: always kept, False: never kept, None: kept if it pays
Forms = bool | Sequence[str] | FormPolicy  # on or off, names of operations that are always kept, or a policy


def read_forms(forms: Any) -> bool | FormPolicy:
    """Return the option `forms` as on, off, or a policy.

    Raises:
        OptionError: if it is none of `Forms`.
    """
    if isinstance(forms, bool) or callable(forms):
        return forms
    if isinstance(forms, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in forms):
        names = frozenset(name.removeprefix("aten.").removeprefix("aten::") for name in forms)
        if unknown := sorted(
            names - {known.split("::")[-1].split(".")[0] for known in torch._C._dispatch_get_all_op_names()}
        ):
            raise OptionError(
                f"forms names {unknown[0]!r}, which is no operation of PyTorch; use the dispatcher's names, such as"
                " ['addmm', 'bmm'], or those that profile.forms of a measured model shows"
            )
        return lambda op: True if op.name in names else None
    raise OptionError(
        f"forms is {forms!r}; give True, False, a list of operations to keep, such as ['addmm', 'bmm'], or a function"
        " of an operation"
    )


@dataclass(frozen=True)
class Choice:
    """A form before it is measured: the bytes that it stores beside the outputs, and the seconds of its redo by the
    log."""

    recipe: Recipe
    nbytes: int
    seconds: float


def unfit(stage: StageModule) -> str | None:
    """Return why `stage` gets no forms, if that is known without running it; None otherwise."""
    if stage.varying:
        return "what it saves depends on data"
    for outer in stage.modules:
        for module in outer.modules():
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                return "it contains a compiled module"
    return None


class StageGraph:
    """The operations of one stage and the storages that each reads and writes.

    Args:
        log: of its forward.
        kinds: of its saved tensors.
    """

    def __init__(self, log: OperationLog, kinds: Sequence[SavedKind]) -> None:
        self._log = log
        self._packs = {n: log.packs[n] for n, kind in enumerate(kinds) if kind is SavedKind.OWN}
        self.writers: dict[int, list[int]] = {}
        self._always: list[int] = []  # operations that run in every redo
        self._draws: list[int] = []
        for position, op in enumerate(log.operations):
            made = self.made(position)
            for storage in dict.fromkeys((*made, *op.writes)):
                self.writers.setdefault(storage, []).append(position)
            if op.draws:
                self._draws.append(position)
            if self._must_run(op, made):
                self._always.append(position)

    def refusal(self) -> str | None:
        """Return why the stage gets no forms, or None."""
        collective = next((op for op in self._log.operations if "c10d" in op.func.namespace), None)
        if collective is not None:
            return f"{collective.name} communicates with other processes"
        for pack in self._packs.values():
            if pack.storage is None or pack.storage not in self._log.made:
                return "autograd saves a tensor that the dispatcher does not see being made"
        return None

    def made(self, position: int) -> list[int]:
        """Return the storages that first appear in the results of the operation at `position`."""
        found = (leaf.storage for leaf in self._log.operations[position].leaves)
        return [s for s in dict.fromkeys(found) if s is not None and self._log.made.get(s) == position]

    def _must_run(self, op: Operation, made: list[int]) -> bool:
        if any(s not in self._log.made for s in op.writes):
            return True  # a buffer
        plain = all(
            leaf.storage is not None or leaf.constant is None or type(leaf.constant) is int for leaf in op.leaves
        )
        if not plain or not any(leaf.storage is not None for leaf in op.leaves):
            return True
        for leaf in op.leaves:
            old = leaf.storage is not None and leaf.storage not in made
            if old and leaf.argument is None and (op.writes or made):
                return True  # returns a new view of an argument beside other results
        return False

    # -- what is saved

    @property
    def given(self) -> frozenset[int]:
        """The storages that exist in any form: those of the outputs."""
        return frozenset(
            p.storage for p in self._packs.values() if p.storage is not None and p.storage in self._log.outputs
        )

    @property
    def saved(self) -> frozenset[int]:
        return frozenset(p.storage for p in self._packs.values() if p.storage is not None)

    def nbytes(self, storages: Iterable[int]) -> int:
        return sum(self._log.nbytes[s] for s in storages)

    def makers(self, storage: int) -> list[Operation]:
        return [self._log.operations[p] for p in self.writers[storage]]

    # -- the redo

    def redo(self, kept: frozenset[int]) -> tuple[set[int], set[int]]:
        """Return the positions of the operations that a redo runs, and the storages that it makes, if no more than
        `kept` are stored."""
        operations, made = self._log.operations, self._log.made
        runs: set[int] = set()
        makes: set[int] = set()
        read: set[int] = set()
        todo: list[int] = []

        def make(storage: int) -> None:
            if storage not in makes and storage in made:
                makes.add(storage)
                todo.extend(self.writers[storage])

        def need(position: int) -> None:
            """Make what the operation at `position` reads."""
            for storage in operations[position].reads:
                if storage in kept and position > self.writers[storage][-1]:
                    continue
                make(storage)
                late = [] if storage in read else self.writers.get(storage, [])
                read.add(storage)
                for writer in late:  # so far it ran only for its mask
                    op = operations[writer]
                    if writer in runs and op.name in MASKED and op.leaves[0].storage == storage:
                        need(writer)

        read |= self.saved - kept
        for storage in self.saved - kept:
            make(storage)
        if not makes:
            return runs, makes
        todo.extend(self._always)
        while todo:
            position = todo.pop()
            if position in runs:
                continue
            runs.add(position)
            op = operations[position]
            for storage in (*self.made(position), *op.writes):
                make(storage)
            if op.name not in LIKE and (op.name not in MASKED or op.leaves[0].storage in read):
                need(position)
            if op.draws:
                todo.extend(p for p in self._draws if p < position)
        # what is made for the sake of another storage is not stored either
        return self.redo(kept - makes) if kept & makes else (runs, makes)

    def recipe(self, kept: frozenset[int]) -> Recipe:
        """Return how the form that stores `kept` is made and redone."""
        runs, makes = self.redo(kept)
        kept = kept - makes
        slots = {n: pack.storage for n, pack in self._packs.items() if pack.storage in kept}
        first: dict[int, int] = {}
        for n, storage in slots.items():
            assert storage is not None
            first.setdefault(storage, n)
        stop = 1 + max(n for n, pack in self._packs.items() if pack.storage not in kept)
        last = self._log.packs[stop - 1].before
        # an operation's own result may be saved before the operation is counted
        functions = tuple(op.func for op in self._log.operations[: last + 1])
        results: dict[int, tuple[Result, ...]] = {}
        single = set()
        for position in range(len(functions)):
            op = self._log.operations[position]
            touched = {*self.made(position), *op.writes}
            if position in runs or not touched or (not op.reads and not touched & kept):
                continue
            results[position] = tuple(self._result(leaf, set(self.made(position)), first) for leaf in op.leaves)
            if op.single:
                single.add(position)
        named = [f"{'+'.join(o.name for o in self.makers(s))} {_shape(self._log, n)}" for s, n in first.items()]
        views = {n: self._log.packs[n].view for n in slots}
        whole = all(position >= last for position in results)
        return Recipe(frozenset(slots), views, stop, functions, results, frozenset(single), tuple(named), whole)

    def _result(self, leaf: Leaf, made: set[int], first: dict[int, int]) -> Result:
        if leaf.storage is None or leaf.view is None:
            return Constant(leaf.constant)
        if leaf.storage not in made:
            assert leaf.argument is not None
            return Argument(leaf.argument)
        if leaf.storage in first:
            return Stored(first[leaf.storage], leaf.view)
        assert leaf.device is not None
        return Unread(leaf.view, leaf.device)

    # -- the forms

    def front(self, policy: FormPolicy | None = None) -> list[Point]:
        """Return the hull of the walk, from most to fewest bytes.

        Without two of the storages, a redo runs and makes what it does without the one and what it does without the
        other. So the redo of each is looked for once, and the walk takes off what the others have run and made.
        """
        always, never = self._ruled(policy)
        free = sorted(self.saved - self.given - always - never)
        dropped = [never - self.given, *(frozenset({storage}) for storage in free)]
        count = len(self._log.operations)
        # columns are operations and then storages; whole numbers, so that what is taken off leaves nothing behind
        weights = np.zeros((count + len(self._log.nbytes), 2), dtype=np.int64)
        weights[:count, 0] = [round(op.seconds * 1e12) for op in self._log.operations]
        for storage in self.saved - self.given:
            weights[count + storage, 1] = self._log.nbytes[storage]
        needs = np.zeros((len(dropped), len(weights)), dtype=bool)
        for need, storages in zip(needs, dropped, strict=True):
            runs, makes = self.redo(self.saved - storages)
            need[[*runs, *(count + storage for storage in makes)]] = True
        left, totals = np.ones(len(weights), dtype=bool), np.array([weights[need].sum(0) for need in needs])
        columns = count + np.array(free, dtype=np.int64)
        walk, row = [], 0
        while True:
            new = needs[row] & left
            left ^= new
            totals -= needs[:, new] @ weights[new]
            walk.append((left[count:].copy(), int(weights[left, 1].sum()), float(weights[~left, 0].sum()) * 1e-12))
            rows = 1 + np.flatnonzero(left[columns])
            if not len(rows):
                break
            cost, gain = totals[rows].T
            rates = np.where(gain > 0, cost / np.maximum(gain, 1), np.where(cost > 0, np.inf, -1.0))
            row = rows[rates.argmin()]
        hull = _hull(walk if dropped[0] else walk[1:])
        return [(frozenset(s for s in self.saved if kept[s]), nbytes, seconds) for kept, nbytes, seconds in hull]

    def _ruled(self, policy: FormPolicy | None) -> tuple[frozenset[int], frozenset[int]]:
        if policy is None:
            return frozenset(), frozenset()
        always, never = set(), set()
        for storage in self.saved:
            rules = [policy(op) for op in self.makers(storage)]
            if True in rules:
                always.add(storage)
            elif False in rules:
                never.add(storage)
        return frozenset(always), frozenset(never)

    def choices(self, policy: FormPolicy | None = None) -> list[Choice]:
        """Return at most `MAX_FORMS` forms worth measuring, from most to fewest bytes."""
        points = _thinned(self.front(policy), (self.nbytes(self.saved - self.given), 0.0))
        return [Choice(self.recipe(kept), nbytes, seconds) for kept, nbytes, seconds in points]

    def choice(self, slots: Iterable[int]) -> Choice | None:
        """Return the form that stores the saved tensors of the indices `slots`; None if these are all, since what is
        copied at one size may not be at another."""
        kept = frozenset(s for n in slots if n in self._packs and (s := self._packs[n].storage) is not None)
        runs, makes = self.redo(kept | self.given)
        if not makes:
            return None
        seconds = sum(self._log.operations[position].seconds for position in runs)
        return Choice(self.recipe(kept | self.given), self.nbytes(kept - makes - self.given), seconds)


Point = tuple[Any, int, float]  # kept storages, their bytes beside the outputs, and the seconds of the redo


def _hull(walk: list[Point]) -> list[Point]:
    """Return the lower left convex hull of points with decreasing bytes, without points beaten in both."""
    found: list[Point] = []
    for point in sorted(walk, key=lambda p: (-p[1], -p[2])):
        while found and found[-1][2] >= point[2]:
            found.pop()
        while len(found) > 1 and _turns(found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return found


def _turns(a: Any, b: Any, c: Any) -> bool:
    """Whether b lies on or above the line from a to c."""
    return bool((a[1] - c[1]) * (b[2] - a[2]) >= (a[1] - b[1]) * (c[2] - a[2]))


def _thinned(points: list[Point], full: tuple[int, float]) -> list[Point]:
    """Return at most `MAX_FORMS` of `points`, always with the last one. The point that forms the smallest triangle with
    its neighbours is dropped first."""
    points = list(points)
    while len(points) > MAX_FORMS:
        ends = [(None, *full), *points]

        def loss(n: int, ends: list[Any] = ends) -> float:
            a, b, c = ends[n], ends[n + 1], ends[n + 2]
            return abs((a[1] - c[1]) * (b[2] - a[2]) - (a[1] - b[1]) * (c[2] - a[2]))

        del points[min(range(len(points) - 1), key=loss)]
    return points


def structure(log: OperationLog, kinds: Sequence[SavedKind]) -> Any:
    """Return what stages with the same forms have in common: operations, shapes, reads and writes."""
    operations = tuple((o.func, o.reads, o.writes, _plain(o.leaves), o.draws) for o in log.operations)
    return operations, log.packs, log.nbytes, log.outputs, tuple(kinds)


def _plain(leaves: tuple[Leaf, ...]) -> Any:
    return tuple((x.storage, x.view, x.argument, repr(x.constant)) for x in leaves)


def _shape(log: OperationLog, n: int) -> str:
    return "x".join(map(str, log.packs[n].shape))
