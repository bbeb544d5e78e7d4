"""The discretization: how bytes become slots for the dynamic programs.

The room of M = mem_limit − |a_0| bytes is cut into N slots of M / N bytes.

- *Sizes held* (|a_i|, |ā_i^k|) become slots by one of two rules. ``"up"`` rounds each size up, which is sound: a plan
  that fits in slots fits in bytes. ``"sums"`` rounds running sums over the stages to the nearest slot and takes
  differences, so that the total of consecutive stages is off by at most one slot (Euro-Par 2020, 5.3.2). This is not
  sound for scattered stages, so its proposals are checked on exact bytes.
- *Needs* of an operation are summed in exact bytes and stay real; idle times become whole slots, rounded up.
- *Backlogs* (A_F, A_B, Δ) are whole slots, drained by clocks: between two moments of a clock the link copies the
  difference of β times these moments, each rounded to the nearest slot, so that the errors of many short stages do not
  add up. The clocks stand at the running u_F (out), u_B (in, at B i) and u_F + u_B (in, at segment i..j). An idle time
  drains the slots that it waits for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..core.modes import whole_number
from .arrays import Arrays

ROUNDINGS = ("up", "sums")
# most slots that the link copies in one step: a faster link hides every copy, and larger sums would lose the low digits
MOST_COPIED = 1e12


@dataclass(frozen=True)
class Slots:
    """A chain in N slots of `room` bytes together; by stage, stages i..k or form f, as the kernels name them.

    out, saved[i, f]: sizes held. U, least: running sums of u_F, and of u_F and u_B in the fastest form. Real needs,
    where more than N becomes N + 1: M_all[i, f], M_B[i, f], delta[j]; M_swept[i, f] of F_all with the input a_{i-1}
    that a sweep has made; M_ck[i] of F_ck i; most[i, k] of F_ck i, F_∅ i+1..k; rest[i, k] of F_∅ i+1..k. early[i, k],
    late[i, k]: the largest of the needs of `most`, less the slots that the link copies in the forwards before it, or
    after it. clock_F, clock_B, clock: slots copied in running u_F, u_B, and both. beta: slots a second.
    """

    L: int
    N: int
    out: np.ndarray
    saved: np.ndarray
    n_forms: np.ndarray
    U: np.ndarray
    u_again: np.ndarray
    u_B: np.ndarray
    least: np.ndarray
    M_all: np.ndarray
    M_B: np.ndarray
    M_swept: np.ndarray
    delta: np.ndarray
    M_ck: np.ndarray
    most: np.ndarray
    rest: np.ndarray
    early: np.ndarray
    late: np.ndarray
    beta_F: float
    beta_B: float
    clock_F: np.ndarray
    clock_B: np.ndarray
    clock: np.ndarray


def discretize(c: Arrays, rates: tuple[float, float], mem_limit: int, N: int, rounding: str) -> Slots:
    """A chain at a limit of `mem_limit` bytes, above a_0, by the rule `rounding`.

    rates: bytes a second out and in. N: requested slots; at petabytes there may be fewer, since sizes are multiplied by
    slots in 64 bits.
    """
    room, L, U = mem_limit - int(c.out[0]), len(c.out) - 1, np.cumsum(c.u_F)
    N = min(N, (2**63 - 1) // room)
    rule = _up if rounding == "up" else _sums
    total = float((c.u_F + c.u_B.max(axis=1)).sum())
    fastest_link = MOST_COPIED / total if total else math.inf
    beta_F, beta_B = (min(rate * N / room, fastest_link) for rate in rates)
    step, (rest, early, late) = _real(c.M_ck, N, room), np.zeros((3, L + 1, L + 1))
    for i in range(1, L):
        q = slice(i, L)
        rest[i, i + 1 : L] = np.maximum.accumulate(step[i, i + 1 : L])
        # Σ_{i≤r<q} u_F(r) = U(q−1) − U(i−1); Σ_{q<r≤k} u_F(r) = U(k) − U(q).
        early[i, q] = np.maximum.accumulate(step[i, q] - beta_F * (U[i - 1 : L - 1] - U[i - 1]))
        late[i, q] = np.maximum.accumulate(step[i, q] + beta_B * U[q]) - beta_B * U[q]
    u_B = np.cumsum(c.u_B[:, 0])
    return Slots(
        L=L,
        N=N,
        out=rule(c.out, N, room),
        saved=np.stack([rule(column, N, room) for column in c.saved.T], axis=1),
        n_forms=c.n_forms,
        U=U,
        u_again=c.u_again,
        u_B=c.u_B,
        least=np.cumsum(c.u_F + c.fastest),
        M_all=_real(c.M_all, N, room),
        M_B=_real(c.M_B, N, room),
        delta=_real(c.delta, N, room),
        M_swept=_real(c.M_all + np.concatenate([[0], c.out[:-1]])[:, None], N, room),
        M_ck=np.ascontiguousarray(step.diagonal()),
        most=_real(c.M_sweep, N, room),
        rest=rest,
        early=early,
        late=late,
        beta_F=beta_F,
        beta_B=beta_B,
        clock_F=beta_F * U,
        clock_B=beta_B * u_B,
        clock=beta_B * (U + u_B),
    )


def _real(sizes: np.ndarray, N: int, room: int) -> np.ndarray:
    """Bytes in slots, not rounded; those above the room become N + 1, which never fits."""
    return np.minimum(sizes.astype(np.float64) * N / room, N + 1.0)


def _up(sizes: np.ndarray, N: int, room: int) -> np.ndarray:
    exact = [min(N + 1, -(-int(size) * N // room)) for size in sizes]
    return np.array(exact, dtype=np.int32)


def _sums(sizes: np.ndarray, N: int, room: int) -> np.ndarray:
    total, before, made = 0, 0, [0]  # a_0 is charged separately
    for size in sizes[1:]:
        total += int(size)
        after = (2 * total * N + room) // (2 * room)
        made.append(min(N + 1, after - before))
        before = after
    return np.array(made, dtype=np.int32)


parse_slots = partial(whole_number, name="mem_slots")
