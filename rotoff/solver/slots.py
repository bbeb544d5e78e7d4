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
from functools import partial

import numpy as np

from ..core.chain import Chain
from ..core.modes import whole_number
from .arrays import arrays

ROUNDINGS = ("up", "sums")
# most slots that the link copies in one step: a faster link hides every copy, and larger sums would lose the low digits
MOST_COPIED = 1e12


class Slots:
    """A chain in N slots of `room` bytes together; by stage, stages i..k or form f, as the kernels name them.

    out, saved[i, f]: sizes held. U, U_keep: running sums of u_F, and of u_F and u_B in the fastest form. tail: seconds
    of u_F that a forward saves right before its backward. Real needs, where more than N becomes N + 1: M_all[i, f],
    M_B[i, f], delta[j]; M_all_swept[i, f] of F_all with the input a_{i-1} that a sweep has made; M_ck[i] of F_ck i;
    M_sweep[i, k] of F_ck i, F_∅ i+1..k; M_none[i, k] of F_∅ i+1..k. early[i, k], late[i, k]: the largest of the needs
    of `M_sweep`, less the slots that the link copies in the forwards before it, or after it. clock_F, clock_B, clock:
    slots copied in running u_F, u_B, and both. beta: slots a second.

    Args:
        mem_limit: bytes, more than a_0. N: requested slots; at petabytes there may be fewer, since sizes are multiplied
            by slots in 64 bits. rounding: the rule.
    """

    def __init__(self, chain: Chain, mem_limit: int, N: int, rounding: str) -> None:
        c = arrays(chain)
        room, L, U, u_B = mem_limit - int(c.out[0]), len(chain), np.cumsum(c.u_F), np.cumsum(c.u_B[:, 0])
        N = min(N, (2**63 - 1) // room)
        rule = _up if rounding == "up" else _sums
        self.L, self.N, self.U, self.n_forms, self.u_again, self.u_B = L, N, U, c.n_forms, c.u_again, c.u_B
        self.out, self.saved = rule(c.out, N, room), np.stack([rule(column, N, room) for column in c.saved.T], axis=1)
        self.U_keep, self.tail = np.cumsum(c.u_F + c.fastest), c.u_F - c.u_again
        needs = c.M_all, c.M_all + np.concatenate([[0], c.out[:-1]])[:, None], c.M_B, c.delta, c.M_ck, c.M_sweep
        self.M_all, self.M_all_swept, self.M_B, self.delta, step, self.M_sweep = (_real(x, N, room) for x in needs)
        total = float((c.u_F + c.u_B.max(axis=1)).sum())
        fastest_link = MOST_COPIED / total if total else math.inf
        beta_F, beta_B = self.beta_F, self.beta_B = [min(rate * N / room, fastest_link) for rate in chain.link[:2]]
        self.clock_F, self.clock_B, self.clock = beta_F * U, beta_B * u_B, beta_B * (U + u_B)
        self.M_ck = np.ascontiguousarray(step.diagonal())
        self.M_none, self.early, self.late = np.zeros((3, L + 1, L + 1))
        for i in range(1, L):
            q = slice(i, L)
            self.M_none[i, i + 1 : L] = np.maximum.accumulate(step[i, i + 1 : L])
            # Σ_{i≤r<q} u_F(r) = U(q−1) − U(i−1); Σ_{q<r≤k} u_F(r) = U(k) − U(q).
            self.early[i, q] = np.maximum.accumulate(step[i, q] - beta_F * (U[i - 1 : L - 1] - U[i - 1]))
            self.late[i, q] = np.maximum.accumulate(step[i, q] + beta_B * U[q]) - beta_B * U[q]


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
