"""Divides a tape of operations into stages, and finds what flows from one to the next.

The variables made before a cut and used after it cross it. They form the tuple that flows from stage to stage,
including skip connections, which every stage in between passes on and is charged for. Cuts are placed greedily: after
about one n-th of all bytes that the operations make, where the fewest bytes cross. The end of a block, where only its
output is alive, beats its middle, where the skip connection is alive, too.

Operations that need no gradient, draw nothing and depend on the batch and constants alone (masks, positions, rotary
tables) run first if several stages use their results, which then exist throughout the step, like the batch, and are
charged once.

A cut never separates an operation that overwrites a tensor from the one that made it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from torch import nn

from ...tensors.lifetimes import Lifetimes
from ...tensors.stage import StageModule
from ..tape import NOTHING, Owned, RecordedCall, Tape
from ..unrepeatable import UncuttableError
from .eager_lifetimes import lifetimes
from .segment import Segment

STAGES = 40  # by default; the solver takes seconds for 100
CROSSING = 0.25  # share of the bytes that a stage makes that it may pass on
COARSE = 12  # a model is cut into at least so many stages, however much they pass on
UNEVEN = 2.0  # most bytes made by one stage / by one if another size's cuts are not used, up to which they are


def stages(tape: Tape, count: int = STAGES, names: Sequence[str] = (), like: Tape | None = None) -> list[StageModule]:
    """Return about `count` stages, or those that end where calls of the modules named `names` end.

    Args:
        like: the same calls on inputs of other sizes. Where it was cut, this one is cut, too, if the stages are about
            as even as with cuts of its own: only profiles of the same stages can be interpolated.

    Raises:
        UncuttableError: if the forward makes none of its results.
    """
    operations = used(tape)
    if not operations:
        raise UncuttableError(
            "the forward computes nothing: no call of torch makes what it returns, so there is nothing to recompute or"
            " to move; train it without rotoff"
        )
    early = _early(tape, operations)
    after = _cuts_at(operations, names) if names else None
    costs = _costs(tape, operations, early)
    positions = _cuts(costs, count, after)
    known = [] if like is None else [cut for cut in like.cuts if cut < len(costs) - 1 and costs[cut].alive is not None]
    if known and _most_made(costs, known) <= UNEVEN * _most_made(costs, positions):
        positions = known
    frozen = _frozen(tape, operations)
    if after is None and frozen and costs[frozen - 1].alive is not None:
        positions = sorted({*positions, frozen - 1})
    tape.cuts = tuple(positions)
    first = _needed_early(tape, operations, early, positions)
    pieces = [first] if first else []
    rest = {id(op) for op in first}
    place: dict[int, int] = {}  # operation -> the piece in which the model runs it
    start = 0
    for cut in [*positions, len(operations) - 1]:
        piece = [op for op in operations[start : cut + 1] if id(op) not in rest]
        place.update((id(op), len(pieces)) for op in operations[start : cut + 1])
        if piece:
            pieces.append(piece)
        start = cut + 1
    needed: dict[int, int] = {}  # variable -> last piece in which an unused result is computed from it
    current = 0
    for op in tape.operations:
        current = max(current, place.get(id(op), 0))
        if id(op) not in place and id(op) not in rest:
            needed.update((n, current) for n in op.reads)
    return _modules(tape, names, pieces, bool(first), needed, lifetimes(tape, operations, first, place, len(pieces)))


def _modules(
    tape: Tape,
    names: Sequence[str],
    pieces: list[list[RecordedCall]],
    prepared: bool,
    needed: dict[int, int],
    lives: list[Lifetimes],
) -> list[StageModule]:
    last_use = needed | {n: len(pieces) for n in tape.result_variables()}
    for number, piece in enumerate(pieces):
        for op in piece:
            for n in op.touched:
                last_use[n] = max(last_use.get(n, 0), number)
    calls = _calls(pieces[0], names)
    whole = calls and calls.isdisjoint(call for piece in pieces[1:] for call in _calls(piece, names))
    found: list[StageModule] = []
    enters, known = list(tape.inputs), dict.fromkeys(tape.inputs)
    for number, piece in enumerate(pieces):
        for op in piece:
            known.update(dict.fromkeys(op.made))
        final = number + 1 == len(pieces)
        leaves = [n for n in known if last_use.get(n, -1) > number]
        name = "masks and tables" if prepared and number == 0 and not whole else _name(piece, names)
        run = Segment(tape, piece, enters, None if final else leaves)
        storages = () if final else tuple(tape.variables[n].storage for n in leaves)
        found.append(StageModule(name, (run,), storages, lives[number]))
        enters = leaves
        known = dict.fromkeys(leaves)
    return found


def used(tape: Tape) -> list[RecordedCall]:
    """Return the operations whose results are used, or that have effects."""
    wanted = set(tape.result_variables())
    kept = []
    for op in reversed(tape.operations):
        asks = op.expected is not NOTHING
        if op.writes or op.writes_owned or op.draws or op.effect or asks or any(n in wanted for n in op.made):
            kept.append(op)
            wanted.update(op.reads)
    return kept[::-1]


@dataclass(frozen=True)
class _Cost:
    """What a cut after an operation costs.

    Attributes:
        made: bytes of the storages that the operation adds.
        alive: (birth, bytes) of every storage needed after it; the birth is the position of the operation that made it.
            Empty if all that crosses can be made first; None if no cut is allowed.
    """

    made: int
    alive: tuple[tuple[int, int], ...] | None

    def price(self, last: int) -> int:
        """Return the bytes that cross here; those that also crossed the cut at `last` count twice, because they are
        charged again."""
        assert self.alive is not None
        return sum(size if birth > last else 2 * size for birth, size in self.alive)


def _costs(tape: Tape, operations: list[RecordedCall], early: set[int]) -> list[_Cost]:
    """Return the cost of a cut after each operation. early: variables that need not cross, because they can be made
    first."""
    births, made = _births(tape, operations)
    inseparable = _inseparable(operations, births)
    begin, end = _crossing(tape, operations)
    lasting = early | set(tape.inputs)
    sizes = {v.storage: v.nbytes for v in tape.variables if v.storage is not None}
    changed = {owned for op in operations for owned in op.writes_owned}
    alive = Counter[int]()  # storage -> variables alive
    bound = 0  # number of alive variables that cannot be a stage's input
    costs = []
    for position in range(len(operations)):
        for variables, more in ((begin, 1), (end, -1)):
            for n in variables.get(position, ()):
                bound += more * _is_bound(tape, n, changed)
                if n not in lasting and (storage := tape.variables[n].storage) is not None:
                    alive[storage] += more
        crossing = tuple((births[s], sizes[s]) for s, count in alive.items() if count)
        costs.append(_Cost(made[position], None if position in inseparable or bound else crossing))
    return costs


def _births(tape: Tape, operations: list[RecordedCall]) -> tuple[dict[int, int], list[int]]:
    """Return the position of the operation that made each storage (-1 for the batch), and the bytes that each operation
    made."""
    births = {s: -1 for n in tape.inputs if (s := tape.variables[n].storage) is not None}
    made = []
    for position, op in enumerate(operations):
        fresh = {v.storage: v.nbytes for v in map(tape.variables.__getitem__, op.made) if v.storage not in births}
        fresh.pop(None, None)
        births.update((storage, position) for storage in fresh if storage is not None)
        made.append(sum(fresh.values()))
    return births, made


def _inseparable(operations: list[RecordedCall], births: dict[int, int]) -> set[int]:
    """Return the positions without a cut: between an operation and one that overwrites its result."""
    spans = [
        range(max(0, births.get(storage, position)), position)
        for position, op in enumerate(operations)
        for storage in op.writes
    ]
    return set(chain.from_iterable(spans))


def _crossing(tape: Tape, operations: list[RecordedCall]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the variables used after the operation that makes them, by its position, and by that of their last use."""
    first: dict[int, int] = {}
    last: dict[int, int] = {n: len(operations) for n in tape.result_variables()}
    for position, op in enumerate(operations):
        for n in op.made:
            first.setdefault(n, position)
        for n in op.touched:
            last[n] = max(last.get(n, -1), position)
    begin, end = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n, position in first.items():
        if last[n] > position:
            begin[position].append(n)
            end[last[n]].append(n)
    return begin, end


def _is_bound(tape: Tape, n: int, changed: set[Owned]) -> bool:
    """Whether a variable cannot be a stage's input: a DTensor, or a view of a parameter or of a buffer that changes,
    which a stage gets from the module."""
    variable = tape.variables[n]
    inner = variable.storage is None and (variable.needs_grad or not changed.isdisjoint(variable.owners))
    return variable.sharded or inner


def _cuts(costs: list[_Cost], count: int, after: list[int] | None) -> list[int]:
    """Return the positions after which to cut: those of `after`, or around every n-th part of all bytes made, where the
    fewest bytes cross.

    If much crosses, compared with what a stage makes, cuts are further apart, up to a `COARSE`-th of all bytes.
    """
    if after is not None:
        return [cut for cut in after if cut < len(costs) - 1 and costs[cut].alive is not None]
    total = sum(cost.made for cost in costs)
    share = total / max(count, 1)
    cuts: list[int] = []
    last, best, made = -1, None, 0
    for position, cost in enumerate(costs[:-1]):
        made += cost.made
        if cost.alive and made >= share / 2 and (best is None or cost.price(last) <= costs[best].price(last)):
            best = position
        if made < 1.5 * share or best is None:
            continue
        if costs[best].price(last) > made * CROSSING and made < total / COARSE:
            continue
        cuts.append(best)
        made = sum(c.made for c in costs[best + 1 : position + 1])
        last, best = best, None
    if best is not None:
        cuts.append(best)
    # the last stage needs an operation
    return [cut for cut in cuts if cut < len(costs) - 1]


def _frozen(tape: Tape, operations: list[RecordedCall]) -> int:
    """Return the number of operations before the first whose result needs a gradient, if some of them read parameters.
    As stages of their own they have no backward."""
    grads = (k for k, op in enumerate(operations) if any(tape.variables[n].needs_grad for n in op.made))
    first = next(grads, 0)
    return first if any(o.table == "_parameters" for op in operations[:first] for o in op.owned()) else 0


def _most_made(costs: list[_Cost], cuts: Sequence[int]) -> int:
    """Return the most bytes that the operations of one stage make."""
    ends = pairwise([0, *(cut + 1 for cut in cuts), len(costs)])
    return max(sum(cost.made for cost in costs[start:end]) for start, end in ends)


def _cuts_at(operations: list[RecordedCall], names: Sequence[str]) -> list[int]:
    """Return the cuts before the first call of one of `names`, and after each."""
    wanted = set(names)
    within: list[tuple[str, int] | None] = [
        next((call for call in op.place if call[0] in wanted), None) for op in operations
    ]
    cuts = [p for p in range(len(within) - 1) if within[p] is not None and within[p + 1] != within[p]]
    start = next((p for p, call in enumerate(within) if call is not None), 0)
    return ([start - 1] if start else []) + cuts


def _early(tape: Tape, operations: list[RecordedCall]) -> set[int]:
    """Return the variables that can be made before all others."""
    changed = {owned for op in operations for owned in op.writes_owned}
    producers: dict[int, RecordedCall] = {}
    movable: dict[int, bool] = {}
    touching: dict[int, list[RecordedCall]] = {}  # storage -> operations that read, make or write it
    for op in operations:
        tensors = [tape.variables[n] for n in op.made]
        movable[id(op)] = (
            not any(v.needs_grad for v in tensors)
            and not (op.draws or op.effect or op.writes_owned or isinstance(op.function, nn.Module))
            and changed.isdisjoint(op.owned())
        )
        for n in op.made:
            producers.setdefault(n, op)
        for n in set(op.touched):
            if (storage := tape.variables[n].storage) is not None:
                touching.setdefault(storage, []).append(op)
    order = {id(op): p for p, op in enumerate(operations)}
    written = {storage for op in operations for storage in op.writes}
    batch = {tape.variables[n].storage for n in tape.inputs}
    again = True
    while again:
        again = False
        for op in operations:
            if movable[id(op)] and any(n in producers and not movable[id(producers[n])] for n in op.reads):
                movable[id(op)] = False
                again = True
        for storage in written:
            group = touching.get(storage, [])
            end = max((order[id(op)] for op in group if storage in op.writes), default=-1)
            if storage in batch or not all(movable[id(op)] for op in group if order[id(op)] <= end):
                for op in group:
                    if movable[id(op)]:
                        movable[id(op)] = False
                        again = True
    return {n for n, op in producers.items() if movable[id(op)]}


def _needed_early(tape: Tape, operations: list[RecordedCall], early: set[int], cuts: list[int]) -> list[RecordedCall]:
    """Return the operations to run first: those that make what would cross a cut, and all that they need."""
    piece_of: dict[int, int] = {}
    number, bounds = 0, set(cuts)
    wanted: set[int] = set()
    for position, op in enumerate(operations):
        for n in op.made:
            piece_of.setdefault(n, number)
        wanted.update(n for n in op.reads if n in early and piece_of.get(n, number) != number)
        if position in bounds:
            number += 1
    written: dict[int, set[int]] = {}
    for op in operations:
        for storage in op.writes:
            written.setdefault(storage, set()).update(op.reads)
    found = []
    for op in reversed(operations):
        made = set(op.made)
        own = bool(made) and made <= early
        writes = [s for s in op.writes if any(tape.variables[n].storage == s for n in wanted)]
        if (own and made & wanted) or (writes and all(n in early for n in op.reads)):
            found.append(op)
            wanted.update(n for n in op.reads if n in early)
    return found[::-1]


def _calls(piece: list[RecordedCall], wanted: Sequence[str]) -> set[tuple[str, int]]:
    """Return the calls of the modules `wanted` that make some of the operations."""
    return {call for op in piece for call in op.place if call[0] in wanted}


def _name(piece: list[RecordedCall], wanted: Sequence[str]) -> str:
    """Name a stage after the modules in which its operations begin and end; only `wanted` ones, if there are any."""
    named = [name for op in piece for name, _ in op.place if name in wanted]
    if not named:
        named = [op.place[-1][0] for op in piece if op.place and op.place[-1][0]]
    if not named:
        named = [op.name for op in piece] or ["output"]
    return named[0] if named[0] == named[-1] else f"{named[0]}..{named[-1]}"
