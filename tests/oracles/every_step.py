"""The fastest steady step of a tiny chain with parameters, by trying every text in which no operation comes twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from random_programs import copied

from rotoff import Chain, InvalidSequenceError, Machine, Op, OpKind, Sequence, simulate
from rotoff.core.sequence import H, U, Value, drop, free, g, o, offload, prefetch, w, wait
from rotoff.core.steady_step import AtRest, group_bytes

MOVES = (OpKind.PREFETCH, OpKind.OFFLOAD, OpKind.FREE, OpKind.DROP)


def subsets(values: list[Value]) -> list[tuple[Value, ...]]:
    return [kept for n in range(len(values) + 1) for kept in combinations(values, n)]


def texts(
    machine: Machine, ops: list[Op], text: list[Op], best: list[float], now: float = 0.0, left: float = 0.0
) -> Iterator[list[Op]]:
    """`text` and all that the machine lets follow, as long as its first step, `left` of which is still to compute, may
    be faster than ``best[0]``: later steps take no less. A wait stands right before a use."""
    if machine.next_backward == 0:
        yield text
    waited = bool(text) and text[-1].kind is OpKind.WAIT
    for op in ops:
        if waited and op.kind in MOVES:
            continue
        trial = copied(machine)
        try:
            event = trial.step(op)
        except InvalidSequenceError:
            continue
        end = max(now, event.end) if event.lane == "compute" else now
        stage = machine.chain.stage(op.stage) if op.kind in (OpKind.F_ALL, OpKind.B) else None
        done = (stage.forward_time if op.kind is OpKind.F_ALL else stage.backward_time) if stage else 0.0
        if end + left - done < best[0] * (1 - 1e-9):
            others = [other for other in ops if other != op]
            yield from texts(trial, others, [*text, op], best, end, left - done)


def fastest(chain: Chain, limit: int, updates: str, upper: float = math.inf) -> float:
    """Seconds; activations stay, all else moves at most once. `upper` where nothing is faster than that."""
    K, L = len(chain.parameters), len(chain)
    moving = [v for k in range(1, K + 1) for v in (w(k), o(k)) if group_bytes(chain, v)]
    gradients = [g(k) for k in range(1, K + 1) if group_bytes(chain, g(k))]
    ops = [Op(kind, i) for kind in (OpKind.F_ALL, OpKind.B) for i in range(1, L + 1)]
    ops += [update(v.stage) for v in gradients for update in (U, H)]
    ops += [move(v) for v in moving for move in (prefetch, wait, offload, free, drop)]
    ops += [move(v) for v in gradients for move in (offload, free)]
    best = [upper]
    for kept in subsets(moving):
        for arriving in subsets(list(kept)):
            for there in subsets([v for v in kept if v not in arriving]):
                on_host = [v for v in moving if v not in kept or v in arriving or v in there]
                device, host = ({v: group_bytes(chain, v) for v in values} for values in (kept, on_host))
                rest = AtRest(device, host, frozenset(arriving))
                found = texts(Machine(chain, limit, rest), ops, [], best, 0.0, chain.compute_time)
                for text in found:
                    try:
                        sequence = Sequence(tuple(text), resident=[str(v) for v in kept])
                        best[0] = min(best[0], simulate(chain, sequence, limit, updates).makespan)
                    except InvalidSequenceError:
                        pass
    return best[0]
