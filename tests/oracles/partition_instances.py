"""Instances of the reductions of Euro-Par 2020: 3-partition (Theorem 1, figure 2) and 2-partition (Theorem 3, figure
3).

x_i there is ā_i here. Where the text is read with care: x_0 is the caller's input here and cannot leave, so a stage
comes first that makes the first number's value; and V appears with the operation *after* each forward of one second
(the text's indices would have it appear with that forward, for which there is no room).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations

from rotoff import Chain, InvalidSequenceError, Op, Stage, simulate
from rotoff.core.sequence import B, F_all, abar, free, offload, prefetch, wait


def _stage(saved: int, forward: float = 0.0, backward: float = 0.0, last: bool = False) -> Stage:
    return Stage("", forward, backward, 0 if last else saved, saved, 0)


def three_partition(numbers: Sequence[int]) -> tuple[Chain, int, float]:
    """(chain, limit, T) for 3m numbers of sum mV: a schedule of T = 2m seconds exists if they split into triples of sum
    V."""
    m = len(numbers) // 3
    V = sum(numbers) // m
    stages = [_stage(u) for u in numbers] + [_stage(0)]
    for k in range(m):
        turn = float(m) if k == 0 else 0.0
        stages += [_stage(0, 1.0, turn), _stage(V, last=k == m - 1)]
    return Chain(tuple(stages), float(V), float(V), duplex=False), m * V, 2.0 * m


def two_partition(numbers: Sequence[int]) -> tuple[Chain, int, float]:
    """(chain, limit, T) for numbers of sum 2V, a byte a second: T = 2V if they split into two parts of sum V."""
    V = sum(numbers) // 2
    stages = [*(_stage(u) for u in numbers), _stage(0), _stage(0, float(V), float(V)), _stage(V), _stage(0, last=True)]
    return Chain(tuple(stages), 1.0, 1.0, duplex=False), 2 * V, 2.0 * V


def triples(numbers: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Indices of a partition into triples of equal sum, or None."""
    V = sum(numbers) * 3 // len(numbers)

    def rest(left: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        if not left:
            return []
        for pair in combinations(left[1:], 2):
            part = (left[0], *pair)
            if sum(numbers[x] for x in part) == V:
                others = rest(tuple(x for x in left if x not in part))
                if others is not None:
                    return [part, *others]
        return None

    return rest(tuple(range(len(numbers))))


def ordered_out(chain: Chain, limit: int, order: Iterable[int]) -> tuple[Op, ...]:
    """The no-wait sequence that offloads ā_i for i of `order`, all made before any time passes, in this order.

    Each is freed as late as memory allows, and all return, last ones first, before the backward that lasts.
    """
    L, waiting = len(chain), list(order)
    turn = next(i for i in range(L, 0, -1) if chain.stage(i).backward_time)
    first = next(i for i in range(1, L + 1) if chain.stage(i).forward_time)
    ops: list[Op] = []
    held, freed = 0, set()
    for i in range(1, L + 1):
        size = chain.stage(i).saved_bytes
        if i == first:
            ops += [offload(abar(v)) for v in waiting]
        while held + size > limit and waiting:
            v = waiting.pop(0)
            ops.append(free(abar(v)))
            freed.add(v)
            held -= chain.stage(v).saved_bytes
        ops.append(F_all(i))
        held += size
    for i in range(L, 0, -1):
        if i == turn:
            ops += [prefetch(abar(v)) for v in sorted(freed, reverse=True)]
        for v in (i, i - 1):
            if v in freed:
                freed.discard(v)
                ops.append(wait(abar(v)))
        ops.append(B(i))
    return tuple(ops)


def times_of_all_orders(chain: Chain, limit: int, numbers: Sequence[int]) -> Iterator[float]:
    """Step times of every order of the numbers' values, out of the device one by one; those that do not fit are left
    out."""
    for order in set(permutations(range(1, len(numbers) + 1))):
        try:
            yield simulate(chain, ordered_out(chain, limit, order), limit).makespan
        except InvalidSequenceError:
            continue
