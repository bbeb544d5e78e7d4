"""The relaxations of Euro-Par 2020, to compare with: copies may stop at any time and release memory byte by byte.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), sections 3.2, 4 and 5. Every stage runs forward once and keeps ā; x_i there is ā_i here, x_0 is a_0
(the caller's: it stays), F_i and B_i there are those of stage i+1. Two relaxations of the machine's whole-value copies:

- *fractional* (section 4): any part of an ā may leave. `optimum` is Theorem 2: the first M_peak - M bytes, in order.
- *interruptible* (section 5, Problem 2): an ā leaves whole or not at all; a search chooses which ones.

Both are schedules of `timeline`, which is given how many bytes of each ā leave. Only one transfer runs at a time,
whatever the chain says of `duplex`: for a chain that is not duplex, `optimum` is below every sequence of mode offload
on the machine. What the machine's limit means holds here too: a_0, a_L, gradients and transients count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rotoff import Chain, min_mem_limit, parse_bytes
from rotoff.solver.arrays import arrays
from rotoff.solver.bounds import infeasible
from rotoff.solver.policies.lowering import needs, peak_bytes

SLACK = 1e-9  # bytes, relative to the limit: what sums of real numbers may be off by


@dataclass(frozen=True)
class Timeline:
    """A no-wait, ordered schedule.

    makespan: seconds.
    offloaded_bytes: bytes that leave and come back.
    forward_starts, backward_starts: seconds at which F_i and B_i start, by i = 1..L (entry 0 is 0).
    gap: idle seconds between the phases.
    """

    makespan: float
    offloaded_bytes: float
    forward_starts: tuple[float, ...]
    backward_starts: tuple[float, ...]
    gap: float


def offload_bound(chain: Chain, mem_limit: int | str) -> float:
    """LB of Proposition 3, in seconds: no schedule that runs every forward once is faster, whole copies or not.

    What is missing at the peak, M_peak - M bytes, has left before it and comes back after it, so that both copies'
    times add up in a duplex chain too. `rotoff.lower_bound` holds in every mode; where only offloading is allowed, this
    may be the higher.
    """
    missing = max(0, peak_bytes(chain) - parse_bytes(mem_limit))
    return max(chain.compute_time, missing / chain.d2h_bandwidth + missing / chain.h2d_bandwidth)


def eager(chain: Chain, quantity: float) -> list[float]:
    """Bytes of each ā (by i = 0..L) that leave when the first `quantity` bytes do, ā_1 first; ā_L stays."""
    saved, left = arrays(chain).saved[:, 0], quantity
    amounts = [0.0] * (len(chain) + 1)
    for i in range(1, len(chain)):
        amounts[i] = min(float(saved[i]), left)
        left -= amounts[i]
    return amounts


def timeline(chain: Chain, mem_limit: int, amounts: Sequence[float]) -> Timeline | None:
    """The no-wait, ordered schedule in which amounts[i] bytes of ā_i leave (i = 0..L; both ends 0); None where it does
    not fit.

    The forward phase runs as early as it can. The backward phase is the same seen backwards in time, as late as it can.
    The gap between them is the least with which the link and the memory allow both (equations 9 and 10).
    """
    c, L = arrays(chain), len(chain)
    m_F, m_B = needs(chain)
    u_F, u_B = c.u_F.tolist(), c.u_B[:, 0].tolist()
    out, back = chain.d2h_bandwidth, chain.h2d_bandwidth
    first = list(accumulate(amounts))  # first[i]: bytes of ā_1..ā_i that leave
    # F_i uses ā_{i-1}, which is on its way out meanwhile; B_i needs it back from its start on. Neither can do without
    # it.
    spare = [0.0, 0.0, *first[: L - 1]]
    ahead = _phase(m_F, u_F, [0.0, *first], spare, mem_limit, out)
    behind = _phase(m_B, u_B, [*spare, first[L - 1]], spare, mem_limit, back)
    if ahead is None or behind is None:
        return None
    gap, slack = 0.0, SLACK * max(1, mem_limit)
    if ahead.backlog > slack and behind.backlog > slack:
        gap = ahead.backlog / out + behind.backlog / back
    elif ahead.backlog > slack:
        gap = _gap(ahead.backlog / out, behind.free, m_B, u_B, mem_limit + ahead.moved, out)
    elif behind.backlog > slack:
        gap = _gap(behind.backlog / back, ahead.free, m_F, u_F, mem_limit + behind.moved, back)
    makespan = ahead.end + gap + behind.end
    starts_B = [0.0] + [makespan - behind.starts[i] - u_B[i] for i in range(1, L + 1)]
    return Timeline(makespan, first[L], tuple(ahead.starts), tuple(starts_B), gap)


@dataclass(frozen=True)
class _Phase:
    """One phase, seen from its outer end. starts: by operation. end: when the last one ends. moved: bytes by then;
    backlog: bytes that are still to move. free: seconds for which the link has had nothing to do."""

    starts: list[float]
    end: float
    moved: float
    backlog: float
    free: float


def _phase(
    need: list[int], u: list[float], movable: list[float], spare: list[float], limit: int, rate: float
) -> _Phase | None:
    """Operations 1..L as early as they can.

    movable[i]: bytes that may be on their way while operation i runs, or waits for memory (entry L + 1: afterwards).
    spare[i]: those of them that it does not use.
    """
    slack = SLACK * max(1, limit)
    starts, time, moved, link_end = [0.0], 0.0, 0.0, 0.0
    for i in range(1, len(need)):
        missing = need[i] - limit
        if missing > spare[i] + slack:
            return None
        wait = max(0.0, (min(missing, spare[i]) - moved) / rate)
        starts.append(time + wait)
        backlog, lasts = movable[i] - moved, wait + u[i]
        if backlog > slack:
            link_end = time + min(backlog / rate, lasts)
            moved = movable[i] if backlog <= rate * lasts else moved + rate * lasts
        time += lasts
    return _Phase(starts, time, moved, movable[-1] - moved, time - link_end)


def _gap(copy: float, free: float, need: list[int], u: list[float], room: float, rate: float) -> float:
    """Equation 9, or 10 seen backwards: `copy` seconds of one direction reach into the other phase, whose link is free
    at first.
    """
    gap, later = max(0.0, copy - free), 0.0
    for j in range(len(need) - 1, 0, -1):
        if later >= free:
            break
        gap = max(gap, (need[j] - room) / rate - later)
        later += u[j]
    return gap


def optimum(chain: Chain, mem_limit: int | str) -> Timeline:
    """The fastest schedule of the fractional relaxation (Theorem 2): the first M_peak - M bytes leave.

    Raises:
        InfeasibleError: below the smallest limit of mode offload.
    """
    limit = parse_bytes(mem_limit)
    if limit < min_mem_limit(chain, "offload"):
        raise infeasible(chain, "offload", limit)
    made = timeline(chain, limit, eager(chain, max(0, peak_bytes(chain) - limit)))
    assert made is not None, "what an operation does not use has left where it must"
    return made
