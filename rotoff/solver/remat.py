"""Pure recompute: rotor's dynamic program with every need checked, and the plan at the smallest limit.

The recurrences (`_dp.Remat`) are C_A of the NeurIPS 2021 supplement, B.3, with Δ = 0, and its forward phase with v
= 0. Unlike rotor's, the first sweep carries no δ_L, keeping all of stage i is checked against δ_j + ā_i + o_F(i) and
its backward's need, and the ā after a swept segment may be kept in the place of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .._dp import Remat, Table
from ..core.chain import Chain
from .arrays import Arrays, arrays
from .bounds import at_rest_bytes, need_tables, remat_arrays
from .plan_codes import CK, DROP, from_forwards, select
from .slots import Slots, discretize

SLOTS = 500
REACHES = (10**9, 32, 16)  # most stages made again from one input
BARE = 16  # most stages made again for an ā that was kept without its input
# rules of rounding, and the tables' bytes / limit: rounding leaves a part of the limit unused
INFLATED = (("up", 1.05), ("sums", 1.02))
FINE = 16  # slots below those of the limit that are tried one by one
SHARES = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)  # bytes / limit, for plans whose values move if they must


@dataclass(frozen=True)
class Needs:
    """Exact bytes beyond the input of i. held[j]: δ_j and a_L; ck[i, k]: F_ck i, F_∅ i+1..k; all, b: by form."""

    held: np.ndarray
    ck: np.ndarray
    all: np.ndarray
    b: np.ndarray


def needs(c: Arrays) -> Needs:
    """Bytes that the operations of the recurrences need; those of forwards without gradients (`held`)."""
    L = len(c.out) - 1
    a_L = c.out[L] * (np.arange(L + 1) < L)
    ck = np.zeros((L + 1, L + 1), dtype=np.int64)
    made = c.out + c.ck_transient
    for i in range(1, L):
        later = made[i:L] + np.concatenate([[0], c.out[i : L - 1]])
        ck[i, i:L] = np.maximum.accumulate(later)
    before = np.concatenate([[0], c.grad[:-1]])
    b = c.saved + c.b_transient + (c.grad + before + a_L)[:, None]
    return Needs(c.grad + a_L, ck, c.saved + c.f_transient, b)


def rows(L: int, reach: int) -> np.ndarray:
    """The first row of the segments (i, i) to (i, i + reach - 1), which end before L, in a table, less i."""
    counts = np.minimum(reach, L - np.arange(1, L + 1))
    return np.concatenate([[0, 0], np.cumsum(counts)]).astype(np.int64) - np.arange(L + 2)


def fill(chain: Chain, slots: Slots, reach: int) -> Remat:
    """The tables at the given slots, with segments of up to `reach` stages; two threads share those of one length."""
    c, L = arrays(chain), len(chain)
    reach = max(1, min(reach, L - 1))
    kernel = Remat(c, slots, needs(c), rows(L, reach), reach, min(BARE, reach))
    with ThreadPoolExecutor(2) as pool:
        for d in range(min(reach, L - 1)):
            count = L - 1 - d
            if count * d < 400:
                kernel.fill(d, 1, 1 + count)
            else:
                cuts = [1, 1 + count // 2, 1 + count]
                list(pool.map(kernel.fill, (d, d), cuts[:-1], cuts[1:]))
    kernel.fill_forward()
    return kernel


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


@dataclass(frozen=True)
class Tables:
    """The recurrences of a chain at one discretization; they have optima for any number of slots up to N."""

    chain: Chain
    slots: Slots
    kernel: Remat

    def plan(self, m: int) -> tuple[float, np.ndarray | None]:
        """(cost in seconds, plan) of the optimum at m slots; (infinity, None) if nothing fits."""
        L = len(self.chain)
        cost = self.kernel.choice(Table.FORWARD, 1, L, m)[0]
        if not math.isfinite(cost):
            return cost, None
        return cost, from_forwards(self.chain, _forwards(self.kernel, self.slots, L, m))


def tables(chain: Chain, mem_limit: int, N: int, reach: int, rounding: str = "up") -> Tables:
    """The recurrences with N slots for `mem_limit` bytes; the limit must exceed a_0.

    reach: most stages that are recomputed from one input.
    """
    slots = discretize(arrays(chain), mem_limit, N, rounding)
    return Tables(chain, slots, fill(chain, slots, reach))


def solve_slots(chain: Chain, mem_limit: int, N: int, rounding: str = "up") -> tuple[float, np.ndarray | None]:
    """(cost in seconds, plan) of the recurrences' optimum at N slots; (infinity, None) if nothing fits."""
    if mem_limit <= chain.input_bytes:
        return math.inf, None
    made = tables(chain, mem_limit, N, len(chain), rounding)
    return made.plan(made.slots.N)


def proposals(
    chain: Chain, limit: int, work: int, fits: Callable[[np.ndarray], bool]
) -> Iterator[tuple[str, np.ndarray]]:
    """(source, plan) of optima by each rounding: at the slots of the limit, and at the most slots that fit."""
    for reaches in (REACHES, REACHES[:1]) if limit > chain.input_bytes else ():
        slots, reach = sized(chain, work, reaches)
        found = False
        for rounding, share in INFLATED:
            made = tables(chain, int(limit * share), slots, reach, rounding)
            for codes, fit in _largest(made, share, fits):
                found |= fit
                yield f"remat-{rounding}", codes
        if found or reach >= len(chain):
            break  # otherwise longer segments may fit, on tables with fewer slots
    smallest = smallest_plan(chain, limit)
    if smallest is not None:
        yield "remat-smallest", smallest


def _largest(made: Tables, share: float, fits: Callable[[np.ndarray], bool]) -> Iterator[tuple[np.ndarray, bool]]:
    """(plan, whether it fits): the first that fits, by falling slots, and the one at the limit's slots if it does not
    fit.
    """
    m, step, before, N = made.slots.N, 1, math.nan, made.slots.N
    while m > 0:
        cost = float(made.kernel.W[1, m])
        if cost != before:
            before = cost
            _, codes = made.plan(m)
            if codes is None:
                return
            fit = fits(codes)
            if fit or m == int(N / share):
                yield codes, fit
            if fit:
                return
        step = step if m > N / share - FINE else step + 1
        m -= step


def inflated(chain: Chain, limit: int, work: int) -> Iterator[tuple[str, np.ndarray]]:
    """(source, plan) of optima for more memory, up to three times the limit."""
    if limit > chain.input_bytes:
        made = tables(chain, int(limit * SHARES[-1]), *sized(chain, work), "sums")
        for share in SHARES:
            _, codes = made.plan(int(made.slots.N * share / SHARES[-1]))
            if codes is not None:
                yield f"remat-{share:.3g}", codes


def _forwards(kernel: Remat, slots: Slots, L: int, m: int) -> list[tuple[int, int]]:
    """The forwards of an optimum in program order, as (stage, code); segments still to run wait on a stack."""
    done: list[tuple[int, int]] = []
    waiting = [(Table.FORWARD, 1, L, m)]
    while waiting:
        table, i, j, m = waiting.pop()
        if table == Table.WITHOUT and i == j:
            continue
        _, kind, k, form = kernel.choice(table, i, j, m)
        left = m - int(slots.out[k] if kind == "ck" else slots.saved[k, form])
        if kind == "bare":
            done += [*segment_codes("ck", i, k - 1), (k, select(form) | DROP)]
            waiting.append((Table.WITHOUT, i, k, left))
        else:
            done += segment_codes(kind, i, form if kind == "all" else k)
            if kind == "ck":
                waiting.append((Table.BACKWARD, i, k, m))
        if k < j:
            waiting.append((table, k + 1, j, left))
    return done


def segment_codes(kind: str, i: int, x: int) -> list[tuple[int, int]]:
    """Codes of one decision: F_all i in form x, or F_ck i, F_∅ i+1..x."""
    if kind == "all":
        return [(i, select(x))]
    return [(i, CK)] + [(q, CK | DROP) for q in range(i + 1, x + 1)]


def smallest_plan(chain: Chain, mem_limit: int, updates: str = "during") -> np.ndarray | None:
    """A recompute plan on exact bytes that keeps what fits, stage by stage; None if by `bounds.need_tables` none fits.

    Parameters stay on the device.
    """
    c, L = remat_arrays(chain, updates), len(chain)
    P, W = need_tables(chain, updates)
    need = needs(c)
    done: list[tuple[int, int]] = []
    waiting: list[tuple[str, int, int, int]] = []  # a stack of work: a segment i..j in m bytes, or a sweep
    i, m = 1, mem_limit - at_rest_bytes(chain) - int(c.out[0])
    if W[1] > m:
        return None
    while i <= L:
        choice = _first_fit(c, need, i, L, m, P, W[1:], 0)
        i, m = _run(c, choice, i, m, done, waiting)
    while waiting:
        what, i, j, m = waiting.pop()
        if what == "sweep":
            done += segment_codes("ck", i, j)
            continue
        choice = _first_fit(c, need, i, j, m, P, P[1:, j], int(need.held[j]))
        next_i, next_m = _run(c, choice, i, m, done, waiting)
        if next_i <= j:
            waiting.append(("segment", next_i, j, next_m))
    return from_forwards(chain, done)


def _run(
    c: Arrays,
    choice: tuple[str, int, int],
    i: int,
    m: int,
    done: list[tuple[int, int]],
    waiting: list[tuple[str, int, int, int]],
) -> tuple[int, int]:
    """Append a choice's forwards to `done`, and its later work to `waiting`. Returns the next stage and its bytes."""
    kind, k, x = choice
    if kind == "all":
        done += segment_codes("all", i, x)
        return i + 1, m - int(c.saved[i, x])
    waiting.append(("segment", i, k if kind == "ck" else k - 1, m))
    if kind == "ck":
        done += segment_codes("ck", i, k)
        return k + 1, m - int(c.out[k])
    waiting.append(("sweep", i, k - 1, m))
    done += segment_codes("ck", i, k - 1)
    done.append((k, select(x) | DROP))
    return k + 1, m - int(c.saved[k, x])


def _first_fit(
    c: Arrays, need: Needs, i: int, j: int, m: int, P: np.ndarray, rest: np.ndarray, held: int
) -> tuple[str, int, int]:
    """A first choice for i..j that leaves the rest feasible in m bytes. rest[k]: least bytes of stages k+1..j.

    ("all", i, form); ("ck", k, 0); or ("bare", k, form): sweep to k - 1, keep ā_k, and make its input again later.
    """
    for x in range(int(c.n_forms[i])):
        if max(held + need.all[i, x], need.b[i, x]) <= m and (i == j or c.saved[i, x] + rest[i] <= m):
            return "all", i, x
    for k in range(j - 1, i - 1, -1):
        if held + need.ck[i, k] <= m and c.out[k] + rest[k] <= m and P[i, k] <= m:
            return "ck", k, 0
    for k in range(j - 1, i, -1):
        for x in range(int(c.n_forms[k])):
            kept, before = int(c.saved[k, x]), int(c.out[k - 1])
            again = need.held[k] + kept + need.ck[i, k - 1]
            operands = max(held + before + need.all[k, x], before + need.b[k, x])
            if held + need.ck[i, k - 1] <= m and max(again, operands, kept + rest[k], P[i, k - 1]) <= m:
                return "bare", k, x
    raise AssertionError("the need tables said that this segment fits")
