"""DYNPROG: which ā to offload, by the dynamic program over fractional communications.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), section 5: equations 1-10, Algorithm 1, and the discretization of 5.3.2 with S = 500 slots.

Symbols: operation i = 0..L-1 of the paper is stage i+1 here, x_i is ā_i (x_0 = a_0), y_i is δ_i; β is two numbers here,
β_F out and β_B in. A state of IDLE_i is (M_F, Δ_F, Δ_B) in slots: bytes on the device at the end of F_{i-1}; bytes
still to be offloaded then (negative: for how many slots' time the link has been free); bytes that must be prefetched
before B_{i-1} starts (negative likewise). Its value is the smallest idle time in seconds. M_B = |y_i| + Δ_B⁺ + M_F -
Δ_F⁺.

Interpretation:

- x_0, the caller's input, never leaves, so slots divide the remaining room; a_L is charged in every B but the last.
- Equation 6 prints ex^F for B's own ex^B; in R_j^B of equation 9 the two gradients of B_j are |y_{j+1}| + |y_j|; M_B of
  equation 10 holds no |y|, since the forward phase has no gradient.
- A Δ below -S is set to -S: once the whole backlog has drained, the constraints are those of Algorithm 1's own check.
- In a duplex chain both directions run at once, so that the idle time between the phases is the larger of the two
  backlogs' times and not their sum, and neither waits for the other's end.
- "If the resulting solution is not feasible" is judged on exact bytes by `lowering.lower`, which also makes the
  schedule.
- States that idle longer than the smallest prefix of stages that fits (GREEDY's, or one more) are pruned; the optimum
  is the same. At or above M_peak nothing is moved.
"""

from __future__ import annotations

import math

import numpy as np

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Sequence
from ..arrays import arrays
from ..bounds import min_mem_limit
from ..plan_codes import keep_all
from .choose import within
from .lowering import Schedule, lower, peak_bytes
from .moving_sets import greedy_set

SLOTS = 500


class Slots:
    """A chain in S slots, by operation i = 0..L-1 (that is stage i+1), as in section 5.3.2; x and y have L+1 entries.

    x: rounded optimistically, as running sums rounded up. ex_F, ex_B, y: rounded up. u_F, u_B: β times the durations,
    running sums rounded down. rate_F, rate_B: slots per second.
    """

    def __init__(self, chain: Chain, mem_limit: int, S: int) -> None:
        c, L = arrays(chain), len(chain)
        room = max(1, mem_limit - int(c.out[0]))

        def up(sizes: np.ndarray) -> np.ndarray:
            return np.minimum(-(-sizes * S // room), 2 * S + 1)

        def sums_down(times: np.ndarray, rate: float) -> np.ndarray:
            return np.diff(np.floor(np.minimum(rate * np.cumsum(times), 1e15)).astype(np.int64), prepend=0)

        sums = -(-np.cumsum(np.concatenate([[0], c.saved[1:, 0]])) * S // room)
        self.S, self.duplex, self.x = S, chain.duplex, np.minimum(np.diff(sums, prepend=0), 2 * S + 1)
        a_L = np.where(np.arange(L) < L - 1, c.out[L], 0)
        self.y, self.ex_F, self.ex_B = up(c.grad), up(c.f_transient[1:, 0]), up(c.b_transient[1:, 0] + a_L)
        self.rate_F, self.rate_B = chain.d2h_bandwidth * S / room, chain.h2d_bandwidth * S / room
        self.u_F, self.u_B = sums_down(c.u_F[1:], self.rate_F), sums_down(c.u_B[1:, 0], self.rate_B)


def step(
    p: Slots, i: int, state: np.ndarray, idle: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One round of Algorithm 1: from IDLE_i to states of i+1.

    Args:
        state: rows M_F, Δ_F, Δ_B by columns, in slots. idle: seconds of each.

    Returns:
        (columns that go on; their idle seconds; states where x_i is offloaded; states where it is not).
    """
    M_F, D_F, D_B = state
    D_F0, D_B0 = np.maximum(D_F, 0), np.maximum(D_B, 0)
    M_B = p.y[i] + D_B0 + M_F - D_F0
    need_F = M_F + p.ex_F[i] + p.x[i + 1]
    need_B = M_B + p.ex_B[i] + p.x[i + 1] + p.y[i + 1]
    on = np.flatnonzero((need_F - D_F0 <= p.S) & (need_B - D_B0 <= p.S))
    M_F, D_F, D_B, D_F0, D_B0 = M_F[on], D_F[on], D_B[on], D_F0[on], D_B0[on]
    wait_F, wait_B = np.maximum(0, need_F[on] - p.S), np.maximum(0, need_B[on] - p.S)  # (1), (6)
    after = idle[on] + wait_F / p.rate_F + wait_B / p.rate_B
    sent, fetched = wait_F + p.u_F[i], wait_B + p.u_B[i]
    backlog = D_F0 + p.x[i]
    moved = (
        M_F + p.x[i + 1] - np.minimum(backlog, sent),  # (3)
        backlog - sent,  # (2)
        p.x[i] + np.maximum(0, D_B - fetched),  # (7)
    )
    kept = (
        M_F + p.x[i + 1] - np.minimum(D_F0, sent),  # (5)
        D_F - sent,  # (4)
        D_B - fetched,  # (8)
    )
    return on, after, _clipped(moved, p.S), _clipped(kept, p.S)


def _clipped(state: tuple[np.ndarray, np.ndarray, np.ndarray], S: int) -> np.ndarray:
    M_F, D_F, D_B = state
    return np.stack([M_F, np.maximum(D_F, -S), np.maximum(D_B, -S)])


def between(p: Slots, state: np.ndarray) -> np.ndarray:
    """ε_G in seconds: the idle time between the phases, equations 9 and 10."""
    M_F, D_F, D_B = state
    L = len(p.u_F)
    out, back = np.maximum(D_F, 0) / p.rate_F, np.maximum(D_B, 0) / p.rate_B
    both = np.maximum(out, back) if p.duplex else out + back
    over = np.concatenate([np.cumsum(p.x[:0:-1])[::-1], [0]])  # over[j] = Σ_{i>j} |x_i|

    def after(rate: float, u: np.ndarray, need: np.ndarray, held: np.ndarray, free_for: np.ndarray) -> np.ndarray:
        """The largest (R_j + held - S) / β - U_j over operations j that run while the other direction is idle."""
        worst, later = np.zeros(len(held)), 0.0
        for j in range(L - 1, -1, -1):
            runs = later < free_for
            if not runs.any():
                break
            R = need[j] - (over[j + 1] if j + 1 <= L else 0)
            worst = np.maximum(worst, np.where(runs, (R + held - p.S) / rate - later, 0.0))
            later += u[j] / rate
        return worst

    free_B, free_F = np.maximum(-D_B, 0) / p.rate_B, np.maximum(-D_F, 0) / p.rate_F
    kept = M_F - np.maximum(D_F, 0)
    only_out = after(p.rate_F, p.u_B * (p.rate_F / p.rate_B), p.ex_B + p.y[1:] + p.y[:-1], M_F, free_B)  # (9)
    only_back = after(p.rate_B, p.u_F * (p.rate_B / p.rate_F), p.ex_F, kept + np.maximum(D_B, 0), free_F)  # (10)
    if not p.duplex:
        only_out, only_back = np.maximum(only_out, out - free_B), np.maximum(only_back, back - free_F)
    one = np.where(D_F > 0, np.maximum(0, only_out), np.where(D_B > 0, np.maximum(0, only_back), 0.0))
    return np.where((D_F > 0) & (D_B > 0), both, one)


def idle_of(p: Slots, out: list[int]) -> float:
    """Idle seconds of one set of offloaded ā in the model; infinite where it does not fit."""
    chosen, L = set(out), len(p.u_F)
    state, idle = np.zeros((3, 1), dtype=np.int64), np.zeros(1)
    for i in range(L):
        on, idle, moved, kept = step(p, i, state, idle)
        if not len(on):
            return float("inf")
        state = moved if i in chosen else kept
    return float((idle + between(p, state))[0])


def optimum(p: Slots, most: float = float("inf")) -> tuple[float, list[int]] | None:
    """(idle seconds, stages whose ā leave) of the program's optimum; None if nothing fits or all idles longer than
    `most`."""
    L = len(p.u_F)
    state, idle = np.zeros((3, 1), dtype=np.int64), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []  # by i: column of i that each state came from, whether x_i left
    for i in range(L):
        on, after, moved, kept = step(p, i, state, idle)
        if i == 0:  # x_0 is the caller's
            states, times, came, left = kept, after, on, np.zeros(len(on), dtype=bool)
        else:
            states, times = np.concatenate([kept, moved], axis=1), np.concatenate([after, after])
            came, left = np.concatenate([on, on]), np.repeat([False, True], len(on))
        good = np.flatnonzero(times <= most)
        states, times, came, left = states[:, good], times[good], came[good], left[good]
        if not len(times):
            return None
        key = (states[0] * (1 << 42)) + ((states[1] + p.S) << 21) + (states[2] + p.S)
        order = np.lexsort((times, key))
        first = np.concatenate([[True], np.diff(key[order]) != 0])
        pick = order[first]
        state, idle = states[:, pick], times[pick]
        trail.append((came[pick], left[pick]))
    total = idle + between(p, state)
    best = int(total.argmin())
    if total[best] > most:
        return None
    answer, out = float(total[best]), []
    for i in range(L - 1, -1, -1):
        came, left = trail[i]
        if left[best]:
            out.append(i)
        best = int(came[best])
    return answer, out[::-1]


def solve_slots(chain: Chain, mem_limit: int, S: int) -> Schedule | None:
    """The schedule of the iterative scheme: optimistic sizes, the nearest one below its value raised until it fits."""
    c = arrays(chain)
    p = Slots(chain, mem_limit, S)
    exact = c.saved[:, 0] * (S / max(1, mem_limit - int(c.out[0])))
    exact[0] = 0
    first = len(greedy_set(chain, mem_limit))
    while True:
        prefixes = (idle_of(p, list(range(1, k + 1))) for k in range(first, len(chain)))
        most = next((idle for idle in prefixes if math.isfinite(idle)), math.inf)
        found = optimum(p, most * (1 + 1e-12) + 1e-12)
        made = None if found is None else lower(chain, mem_limit, found[1])
        if made is not None:
            return made
        below = np.flatnonzero(p.x < exact)
        if found is None or not len(below):
            return None
        p.x[below[(exact - p.x)[below].argmin()]] += 1


def dynprog(chain: Chain, mem_limit: int, slots: int = SLOTS) -> Sequence:
    """DYNPROG's sequence within `mem_limit` bytes.

    Args:
        slots: S, the slots that the limit is cut into.

    Raises:
        InfeasibleError: below the smallest limit of mode offload, and where nothing fits at that many slots.
        OptionError: if `slots` is no whole number of at least 1.
    """
    S = whole_number(slots, "slots")
    least, most = min_mem_limit(chain, "offload"), peak_bytes(chain)
    if mem_limit >= most:
        return Sequence(keep_all(chain).ops, meta={"source": "dynprog, nothing moves"})
    made = within("dynprog", mem_limit, lambda limit: solve_slots(chain, limit, S), most, least)
    return Sequence(made.ops, meta={"source": f"dynprog, S = {slots}"})
