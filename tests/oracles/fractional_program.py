"""The fractional relaxation of Euro-Par 2020 as a linear program, and Problem 2 by trying every set; nothing shared
with the product.

Time is cut where operations start and end. By Lemma 1 bytes are all alike: what counts is how many have left and
returned.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

from rotoff import Chain

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import fractional


def fractional_optimum(chain: Chain, limit: int) -> float | None:
    """Seconds of the fastest fractional schedule with one transfer at a time; None where none fits.

    Variables, for each operation t = 0..2L-1 (F_1..F_L, B_L..B_1): idle seconds before it, and bytes out and back in
    that idle time and in the operation itself.
    """
    from scipy.optimize import linprog

    L = len(chain)
    out, back = 1 / chain.d2h_bandwidth, 1 / chain.h2d_bandwidth
    size = [0] + [s.saved_bytes for s in chain.stages]
    duration = [s.forward_time for s in chain.stages] + [s.backward_time for s in reversed(chain.stages)]
    stage = [*range(1, L + 1), *range(L, 0, -1)]
    a_L = chain.stage(L).output_bytes

    def need(t: int) -> int:
        i, s = stage[t], chain.stage(stage[t])
        kept = chain.input_bytes + sum(size[: i + 1])
        if t < L:
            return kept + s.forward_transient_bytes
        return kept + chain.grad_bytes(i) + chain.grad_bytes(i - 1) + s.backward_transient_bytes + (a_L if i < L else 0)

    n = 5 * 2 * L  # idle, out while idle, back while idle, out while it runs, back while it runs
    rows, most = [], []

    def at_most(coefficients: dict[int, float], bound: float) -> None:
        row = [0.0] * n
        for x, value in coefficients.items():
            row[x] += value
        rows.append(row)
        most.append(bound)

    def away(t: int, where: int) -> dict[int, float]:
        """Bytes on the host: 0 before the idle time of t, 1 at its start, 2 at its end."""
        sums: dict[int, float] = {}
        for s in range(t + 1):
            steps = 2 if s < t else where
            if steps >= 1:
                sums[5 * s + 1], sums[5 * s + 2] = 1.0, -1.0
            if steps == 2:
                sums[5 * s + 3], sums[5 * s + 4] = 1.0, -1.0
        return sums

    for t in range(2 * L):
        i, x = stage[t], 5 * t
        operands = [0, i] if i == 1 else [i - 1, i]
        if need(t) - sum(size[j] for j in range(i) if j not in operands) > limit:
            return None
        at_most({x + 1: out, x + 2: back, x: -1.0}, 0.0)
        at_most({x + 3: out, x + 4: back}, duration[t])
        for where in (1, 2):
            at_most({y: -v for y, v in away(t, where).items()}, limit - need(t))
            at_most({y: -v for y, v in away(t, where).items()}, 0.0)
        if t < L:  # out: what has been made by then; a_0 and ā_L stay
            made = sum(size[1:i])
            for where in (1, 2):
                outs = {y: 1.0 for y in away(t, where) if y % 5 in (1, 3)}
                at_most(outs, made)
        else:  # all that B_i uses is back from its start on
            outs = {y: 1.0 for y in away(t, 2) if y % 5 in (1, 3)}
            at_most(outs, sum(size[1:L]))
            for where in (1, 2):
                at_most(away(t, where), sum(size[1 : max(1, i - 1)]))
    goal = [1.0 if x % 5 == 0 else 0.0 for x in range(n)]
    found = linprog(goal, A_ub=rows, b_ub=most, method="highs")
    return sum(duration) + found.fun if found.success else None


def interruptible_optimum(chain: Chain, limit: int) -> float | None:
    """Seconds of the fastest schedule with whole values and interruptible copies; None where none fits."""
    times = [
        made.makespan for out in sets(len(chain)) if (made := fractional.timeline(chain, limit, whole(chain, out)))
    ]
    return min(times, default=None)


def sets(L: int):
    return (out for count in range(L) for out in combinations(range(1, L), count))


def whole(chain: Chain, out) -> list[float]:
    """Amounts of `timeline` where each ā of `out` leaves whole."""
    return [float(chain.stage(i).saved_bytes) if i in out else 0.0 for i in range(len(chain) + 1)]
