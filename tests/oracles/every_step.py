"""The fastest steady step of a tiny chain with parameters, by trying every text in which no operation comes twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from random_programs import copied

from rotoff import Chain, InvalidSequenceError, Machine, Op, OpKind, Sequence, simulate
from rotoff.core.sequence import H, U, Value, drop, free, g, o, offload, prefetch, w, wait
from rotoff.core.steady_step import AtRest, group_bytes


def subsets(values: list[Value]) -> list[tuple[Value, ...]]:
    return [kept for n in range(len(values) + 1) for kept in combinations(values, n)]


def texts(chain: Chain, machine: Machine, ops: list[Op], text: list[Op]) -> Iterator[list[Op]]:
    """`text` and all that the machine lets follow."""
    if machine.next_backward == 0:
        yield text
    for op in ops:
        trial = copied(machine)
        try:
            trial.step(op)
        except InvalidSequenceError:
            continue
        yield from texts(chain, trial, [other for other in ops if other != op], [*text, op])


def fastest(chain: Chain, limit: int, updates: str) -> float:
    """Seconds; activations stay, all else moves at most once."""
    K, L = len(chain.parameters), len(chain)
    moving = [v for k in range(1, K + 1) for v in (w(k), o(k)) if group_bytes(chain, v)]
    gradients = [g(k) for k in range(1, K + 1) if group_bytes(chain, g(k))]
    ops = [Op(kind, i) for kind in (OpKind.F_ALL, OpKind.B) for i in range(1, L + 1)]
    ops += [update(v.stage) for v in gradients for update in (U, H)]
    ops += [move(v) for v in moving for move in (prefetch, wait, offload, free, drop)]
    ops += [move(v) for v in gradients for move in (offload, free)]
    best = math.inf
    for kept in subsets(moving):
        for arriving in subsets(list(kept)):
            for there in subsets([v for v in kept if v not in arriving]):
                on_host = [v for v in moving if v not in kept or v in arriving or v in there]
                rest = AtRest(
                    {v: group_bytes(chain, v) for v in kept},
                    {v: group_bytes(chain, v) for v in on_host},
                    frozenset(arriving),
                )
                for text in texts(chain, Machine(chain, limit, rest), ops, []):
                    try:
                        sequence = Sequence(tuple(text), resident=[str(v) for v in kept])
                        best = min(best, simulate(chain, sequence, limit, updates).makespan)
                    except InvalidSequenceError:
                        pass
    return best
