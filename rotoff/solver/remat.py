"""Pure recompute: rotor's dynamic program with every need checked, and the plan at the smallest limit.

The recurrences (`_dp.Opt`) are C_A of the NeurIPS 2021 supplement, B.3, with Δ = 0, and its forward phase with v
= 0. Unlike rotor's, the first sweep carries no δ_L, keeping all of stage i is checked against δ_j + ā_i + o_F(i) and
its backward's need, and the ā after a swept segment may be kept in the place of its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from .._dp import First, Opt, Table
from ..core.chain import Chain
from .arrays import Arrays
from .bounds import at_rest_bytes, remat_arrays, remat_needs
from .plan_codes import CK, DROP, from_forwards, select
from .slots import ROUNDINGS, Slots

SLOTS = 500
REACHES = (10**9, 32, 16)  # most stages made again from one input
BARE = 16  # most stages made again for an ā that was kept without its input
SHARES = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)  # bytes / limit, for plans whose values move if they must


def sized(chain: Chain, work: int, reaches: tuple[int, ...] = REACHES) -> tuple[int, int]:
    """(slots, reach) for tables with about `work` states times choices; the first reach that leaves `SLOTS` slots.

    Most recomputed segments are short, and slots finer than the stages are worth more than long segments.
    """
    L, K = len(chain), 1 + max(len(s.forms) for s in chain.stages)
    for most in reaches:
        reach = min(L, most)
        d = np.arange(reach)
        bare = np.minimum(d, BARE)
        each = int(((L - d) * (d + K * bare + (d < BARE) * d)).sum())
        slots = min(2 * SLOTS, work // max(1, each))
        if slots >= SLOTS:
            break
    return max(8, slots), reach


def tables(
    chain: Chain, mem_limit: int, N: int, rounding: str = "up", reach: int | None = None, whole: Table = Table.FORWARD
) -> Opt:
    """The recurrences with N slots for `mem_limit` bytes; the limit must exceed a_0.

    reach: most stages that are recomputed from one input; None for any number. whole: the table that has the optimum;
    BACKWARD for rotor's own.
    """
    slots, published = Slots(chain, mem_limit, N, rounding), whole == Table.BACKWARD
    last = slots.L if published else slots.L - 1
    reach = max(1, min(reach or last, last))
    return Opt(slots, last, reach, 0 if published else min(BARE, reach))


def plan_of(chain: Chain, kernel: Opt, m: int, whole: Table = Table.FORWARD) -> tuple[float, np.ndarray | None]:
    """(cost in seconds, plan) of the optimum at m slots; (infinity, None) if nothing fits."""
    cost = kernel.choice(whole, 1, len(chain), m)[0]
    return cost, from_forwards(chain, forwards(kernel, whole, m)) if math.isfinite(cost) else None


@lru_cache(maxsize=16)  # joint asks for what remat has asked for
def solve_slots(
    chain: Chain, mem_limit: int, N: int, rounding: str = "up", reach: int | None = None, whole: Table = Table.FORWARD
) -> tuple[float, np.ndarray | None]:
    """(cost in seconds, plan) of the recurrences' optimum at N slots; (infinity, None) if nothing fits."""
    if mem_limit <= chain.input_bytes:
        return math.inf, None
    kernel = tables(chain, mem_limit, N, rounding, reach, whole)
    return plan_of(chain, kernel, kernel.slots.N, whole)


def proposals(chain: Chain, limit: int, work: int) -> Iterator[tuple[str, np.ndarray]]:
    """(source, plan) of the optima by each rounding, and of the smallest plan."""
    slots, reach = sized(chain, work)
    plans = {f"remat-{rounding}": solve_slots(chain, limit, slots, rounding, reach)[1] for rounding in ROUNDINGS}
    plans["remat-smallest"] = smallest_plan(chain, limit)
    yield from ((source, codes) for source, codes in plans.items() if codes is not None)


def inflated(chain: Chain, limit: int, work: int) -> Iterator[tuple[str, np.ndarray]]:
    """(source, plan) of optima for more memory, up to three times the limit."""
    if limit > chain.input_bytes:
        slots, reach = sized(chain, work)
        made = tables(chain, int(limit * SHARES[-1]), slots, "sums", reach)
        for share in SHARES:
            _, codes = plan_of(chain, made, int(made.slots.N * share / SHARES[-1]))
            if codes is not None:
                yield f"remat-{share:.3g}", codes


def forwards(kernel: Opt, whole: Table, m: int) -> list[tuple[int, int]]:
    """The forwards of an optimum in program order, as (stage, code); segments still to run wait on a stack."""
    done, slots = list[tuple[int, int]](), kernel.slots
    waiting = [(whole, 1, slots.L, m)]
    while waiting:
        table, i, j, m = waiting.pop()
        if table == Table.BESIDE and i == j:
            continue
        _, first, k, form = kernel.choice(table, i, j, m)
        left = m - int(slots.out[k] if first == First.CK else slots.saved[k, form])
        if first == First.BARE:
            done += [*first_codes(i, k - 1), (k, select(form) | DROP)]
            waiting.append((Table.BESIDE, i, k, left))
        else:
            done += first_codes(i, k if first == First.CK else 0, form)
            if first == First.CK:
                waiting.append((Table.BACKWARD, i, k, m))
        if k < j:
            waiting.append((table, k + 1, j, left))
    return done


def first_codes(i: int, cut: int, form: int = 0) -> list[tuple[int, int]]:
    """Codes of one decision: F_all i in `form` if `cut` is 0, else F_ck i, F_∅ i+1..cut."""
    if not cut:
        return [(i, select(form))]
    return [(i, CK)] + [(q, CK | DROP) for q in range(i + 1, cut + 1)]


def smallest_plan(chain: Chain, mem_limit: int, updates: str = "during") -> np.ndarray | None:
    """A recompute plan on exact bytes that keeps what fits, stage by stage; None if by `bounds.remat_needs` none fits.

    Parameters stay on the device.
    """
    c, L, needs = remat_arrays(chain, updates), len(chain), remat_needs(chain, updates)
    m = mem_limit - at_rest_bytes(chain) - int(c.out[0])
    if needs[1, L] > m:
        return None
    done: list[tuple[int, int]] = []
    waiting: list[tuple[int, int, int | None]] = [(1, L, m)]  # segments i..j in m bytes, and sweeps, without m
    while waiting:
        i, j, left = waiting.pop()
        if left is None:
            done += first_codes(i, j)
            continue
        first, k, form = _first_fit(c, i, j, left, needs)
        if first == First.BARE:
            done += [*first_codes(i, k - 1), (k, select(form) | DROP)]
            waiting += [(i, k - 1, left), (i, k - 1, None)]
        else:
            done += first_codes(i, k if first == First.CK else 0, form)
            waiting += [(i, k, left)] if first == First.CK else []
        if k < j:
            waiting.append((k + 1, j, left - int(c.out[k] if first == First.CK else c.saved[k, form])))
    return from_forwards(chain, done)


def _first_fit(c: Arrays, i: int, j: int, m: int, needs: np.ndarray) -> tuple[First, int, int]:
    """A first choice for i..j, as in `Opt.choice`, that leaves the rest feasible in m bytes."""
    held, rest = int(c.delta[j]) if j < len(c.out) - 1 else 0, needs[1:, j]
    for x in range(int(c.n_forms[i])):
        if max(held + c.M_all[i, x], c.M_B[i, x]) <= m and (i == j or c.saved[i, x] + rest[i] <= m):
            return First.ALL, i, x
    for k in range(j - 1, i - 1, -1):
        if held + c.M_sweep[i, k] <= m and c.out[k] + rest[k] <= m and needs[i, k] <= m:
            return First.CK, k, 0
    for k in range(j - 1, i, -1):
        for x in range(int(c.n_forms[k])):
            kept, before = int(c.saved[k, x]), int(c.out[k - 1])
            again = c.delta[k] + kept + c.M_sweep[i, k - 1]
            operands = max(held + before + c.M_all[k, x], before + c.M_B[k, x])
            if held + c.M_sweep[i, k - 1] <= m and max(again, operands, kept + rest[k], needs[i, k - 1]) <= m:
                return First.BARE, k, x
    raise AssertionError("the table of needs said that this segment fits")
