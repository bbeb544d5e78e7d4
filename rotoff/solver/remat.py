"""Pure recompute: rotor's dynamic program with every need checked, and the plan at the smallest limit.

The recurrences are C_A of the NeurIPS 2021 supplement, B.3, with Δ = 0, and its forward phase with v = 0. Unlike rotor's,
the first sweep carries no δ_L, and keeping all of stage i is checked against δ_j + ā_i + o_F(i) and its backward's need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .._dp import remat_diagonal
from ..bounds import Arrays, arrays, at_rest_bytes, need_tables, remat_arrays
from ..chain import Chain
from .plan import CK, DROP, from_forwards, select
from .slots import Slots, discretize


@dataclass(frozen=True)
class Tables:
    """C[base[i] + j, m]: backward segments; W[i, m]: forward phase from stage i; seconds, m slots beyond the input."""

    slots: Slots
    base: np.ndarray
    C: np.ndarray
    W: np.ndarray


@dataclass(frozen=True)
class Needs:
    """Exact bytes beyond the input of i. held[j]: δ_j and a_L; ck[i, k]: F_ck i, F_∅ i+1..k; all, b: by form."""

    held: np.ndarray
    ck: np.ndarray
    all: np.ndarray
    b: np.ndarray


def needs(c: Arrays) -> Needs:
    """What the operations of the recurrences need, before gradients (`held`) are added to forwards."""
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


def fill(chain: Chain, slots: Slots) -> Tables:
    """Both tables at the given slots; rows of one diagonal are shared by two threads."""
    c, L, N = arrays(chain), len(chain), slots.N
    need = needs(c)
    base = np.zeros(L + 2, dtype=np.int64)  # row base[i] + j for 1 <= i <= j < L
    for i in range(1, L + 1):
        base[i] = (i - 1) * (L - 1) - (i - 1) * (i - 2) // 2 - i
    C = np.empty((max(1, L * (L - 1) // 2), N + 1))
    U = np.cumsum(c.u_F)
    shared = (C, base, U, c.u_B, c.n_forms, slots.out, slots.saved, need.held, need.ck, need.all, need.b, slots.room)
    least = np.zeros(len(C), dtype=np.int32)
    with ThreadPoolExecutor(2) as pool:
        for d in range(L - 1):
            count = L - 1 - d
            if count * d < 400:
                remat_diagonal(d, 1, 1 + count, *shared, least)
            else:
                cuts = [1, 1 + count // 2, 1 + count]
                list(pool.map(lambda a, b, d=d: remat_diagonal(d, a, b, *shared, least), cuts[:-1], cuts[1:]))
    W = np.full((L + 2, N + 1), math.inf)
    for i in range(L, 0, -1):
        for _, first, cost in _forward_choices(c, slots, need, Tables(slots, base, C, W), U, i):
            W[i, first:] = np.minimum(W[i, first:], cost)
    return Tables(slots, base, C, W)


def to_slots(size: int, slots: Slots) -> int:
    """Slots for a need of `size` bytes, rounded up; at most N + 1, which fits nowhere."""
    return min(slots.N + 1, -(-int(size) * slots.N // max(slots.room, 1)))


def _forward_choices(
    c: Arrays, slots: Slots, need: Needs, t: Tables, U: np.ndarray, i: int
) -> Iterator[tuple[tuple[str, int], int, np.ndarray]]:
    """(choice, first m, cost from there on) of every first operation of the forward phase at stage i.

    A choice is ("all", form) or ("ck", k): F_ck i, F_∅ i+1..k.
    """
    L, N = len(c.out) - 1, slots.N
    for x in range(int(c.n_forms[i])):
        first = to_slots(max(need.all[i, x], need.b[i, x]), slots)
        cost = c.u_F[i] + c.u_B[i, x]
        size = int(slots.saved[i, x]) if i < L else 0
        first = max(first, size)
        if first <= N:
            yield ("all", x), first, cost + (t.W[i + 1, first - size : N + 1 - size] if i < L else np.zeros(N + 1 - first))
    for k in range(i, L):
        size = int(slots.out[k])
        first = max(to_slots(need.ck[i, k], slots), size)
        if first <= N:
            yield ("ck", k), first, U[k] - U[i - 1] + t.C[t.base[i] + k, first:] + t.W[k + 1, first - size : N + 1 - size]


def _backward_choices(
    c: Arrays, slots: Slots, need: Needs, t: Tables, U: np.ndarray, i: int, j: int, m: int
) -> Iterator[tuple[tuple[str, int], float]]:
    """(choice, cost) of every first operation of the segment i..j with m slots, in the kernel's own arithmetic."""
    for x in range(int(c.n_forms[i])):
        size = int(slots.saved[i, x]) if i < j else 0
        if max(to_slots(max(need.held[j] + need.all[i, x], need.b[i, x]), slots), size) <= m:
            cost = U[i] - U[i - 1] + c.u_B[i, x]
            yield ("all", x), cost + (t.C[t.base[i + 1] + j, m - size] if i < j else 0.0)
    for k in range(i, j):
        size = int(slots.out[k])
        if max(to_slots(need.held[j] + need.ck[i, k], slots), size) <= m:
            yield ("ck", k), U[k] - U[i - 1] + t.C[t.base[i] + k, m] + t.C[t.base[k + 1] + j, m - size]


def quick_slots(chain: Chain) -> int:
    """N at which the tables take about a tenth of a second and stay small: enough where a search follows."""
    L = len(chain)
    return max(8 if L <= 600 else 4, min(500, 600_000_000 // L**3, 64_000_000 // L**2))


def remat_cost(t: Tables) -> float:
    """Seconds of the recurrences' optimum, infinite where nothing fits the slots."""
    return float(t.W[1, t.slots.N])


def solve_slots(chain: Chain, mem_limit: int, N: int, rounding: str = "up") -> tuple[float, np.ndarray | None]:
    """(cost in seconds, plan) of the recurrences' optimum at N slots; (infinity, None) where nothing fits."""
    c = arrays(chain)
    if mem_limit <= int(c.out[0]):
        return math.inf, None
    slots = discretize(c, mem_limit, N, rounding)
    t = fill(chain, slots)
    if not math.isfinite(remat_cost(t)):
        return math.inf, None
    return remat_cost(t), from_forwards(chain, _forwards(chain, t))


def _forwards(chain: Chain, t: Tables) -> list[tuple[int, int]]:
    """The forwards of an optimal tree in program order, as (stage, code); segments still to run wait on a stack."""
    c, L, N, slots = arrays(chain), len(chain), t.slots.N, t.slots
    need, U = needs(c), np.cumsum(c.u_F)
    done: list[tuple[int, int]] = []
    waiting: list[tuple[int, int, int]] = []
    i, m = 1, N
    while i <= L:
        firsts = _forward_choices(c, slots, need, t, U, i)
        options = [(float(cost[m - first]), choice) for choice, first, cost in firsts if first <= m]
        _, (kind, x) = min(options, key=lambda option: option[0])
        done += segment_codes(kind, i, x)
        if kind == "all":
            i, m = i + 1, m - (int(slots.saved[i, x]) if i < L else 0)
        else:
            waiting.append((i, x, m))
            i, m = x + 1, m - int(slots.out[x])
    while waiting:
        i, j, m = waiting.pop()
        (kind, x), _ = min(_backward_choices(c, slots, need, t, U, i, j, m), key=lambda option: option[1])
        done += segment_codes(kind, i, x)
        if kind == "ck":
            waiting.append((i, x, m))
            waiting.append((x + 1, j, m - int(slots.out[x])))
        elif i < j:
            waiting.append((i + 1, j, m - int(slots.saved[i, x])))
    return done


def segment_codes(kind: str, i: int, x: int) -> list[tuple[int, int]]:
    """Codes of one decision: F_all i in form x, or F_ck i, F_∅ i+1..x."""
    if kind == "all":
        return [(i, select(x))]
    return [(i, CK)] + [(q, CK | DROP) for q in range(i + 1, x + 1)]


def smallest_plan(chain: Chain, mem_limit: int, updates: str = "during") -> np.ndarray | None:
    """A recompute plan on exact bytes wherever `bounds.need_tables` says that one fits; it keeps what fits, stage by stage.

    Parameters stay on the device.
    """
    c, L = remat_arrays(chain, updates), len(chain)
    P, W = need_tables(chain, updates)
    need = needs(c)
    done: list[tuple[int, int]] = []
    waiting: list[tuple[str, int, int, int]] = []  # what still runs, last first: a segment i..j in m bytes, or a sweep
    i, m = 1, mem_limit - at_rest_bytes(chain) - int(c.out[0])
    if W[1] > m:
        return None
    while i <= L:
        choice = _first_fit(c, need, i, L, m, P, W[1:], 0, i == L)
        i, m = _run(c, choice, i, m, done, waiting)
    while waiting:
        what, i, j, m = waiting.pop()
        if what == "sweep":
            done += segment_codes("ck", i, j)
            continue
        choice = _first_fit(c, need, i, j, m, P, P[1:, j], int(need.held[j]), i == j)
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
    """Append a choice's forwards; what it leaves for later goes to `waiting`. Returns where to go on, with how many bytes."""
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
    c: Arrays, need: Needs, i: int, j: int, m: int, P: np.ndarray, rest: np.ndarray, held: int, alone: bool
) -> tuple[str, int, int]:
    """A first choice for i..j that leaves the rest feasible in m bytes; rest[k] is what stages k+1..j need at least.

    ("all", i, form); ("ck", k, 0); or ("bare", k, form): sweep to k - 1, keep ā_k without its input, which is made again.
    """
    for x in range(int(c.n_forms[i])):
        if max(held + need.all[i, x], need.b[i, x]) <= m and (alone or c.saved[i, x] + rest[i] <= m):
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
