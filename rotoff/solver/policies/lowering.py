"""Makes operations for a set of ā that leave the device: decides when each leaves and returns. Every stage runs
forward once.

The model of Euro-Par 2020 (its x_i is ā_i here, x_0 is a_0, which stays), in the machine's terms: whole values, and two
lanes if the chain is duplex. A schedule is *ordered* (out by rising stages, back by falling ones) and *no-wait*
(everything as early as possible). `lower` walks over the 2L compute operations with the machine's three lanes as
clocks:

- ``offload`` follows the forward that makes the value;
- ``free`` comes before the first operation at which the copy out has ended (it costs nothing then), or as soon as
  memory is needed, and compute waits; the value that was offloaded first is freed first;
- ``prefetch`` goes in order of need, as early as every operation up to that need fits with it, but not before the whole
  set has left or the last forward has run; after the first prefetch, values are freed only if memory is needed;
- ``wait`` comes just before the need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...core.chain import Chain
from ...core.lanes import Lanes
from ...core.sequence import B, F_all, Op, abar, free, offload, prefetch, wait
from ..arrays import arrays

ENDLESS = 1 << 62  # bytes


@dataclass(frozen=True)
class Schedule:
    """Operations in program order, and their seconds in the machine."""

    makespan: float
    ops: tuple[Op, ...]


def needs(chain: Chain) -> tuple[list[int], list[int]]:
    """m_F and m_B of the paper's section 3.2: bytes held during F_1..F_L and B_1..B_L with nothing moved (entry 0 is
    0)."""
    c = arrays(chain)
    kept = int(c.out[0]) + np.cumsum(c.saved[:, 0]) - c.saved[:, 0]  # before F_i
    m_F, m_B = kept + c.M_all[:, 0], kept + c.M_B[:, 0]
    return [0, *m_F[1:].tolist()], [0, *m_B[1:].tolist()]


def peak_bytes(chain: Chain) -> int:
    """M_peak: the bytes of keeping everything."""
    m_F, m_B = needs(chain)
    return max(*m_F, *m_B)


def moving_needs(chain: Chain) -> list[int]:
    """m_F and m_B in program order (t = 0..2L-1), where copies are issued in between.

    Such a copy sees δ_L as soon as F_L has run, and a_L, which may outweigh the ā_L that held it, as soon as B_L has.
    """
    c, L = arrays(chain), len(chain)
    m_F, m_B = needs(chain)
    kept = int(c.out[0]) + int(c.saved[1:, 0].sum())
    m_F[L] = max(m_F[L], kept + int(c.grad[L]))
    if L > 1:
        m_B[L] = max(m_B[L], kept - int(c.saved[L, 0]) + int(c.delta[L - 1]))
    return m_F[1:] + m_B[:0:-1]


def lower(
    chain: Chain,
    mem_limit: int,
    out: Iterable[int],
    release: str = "copied",
    ahead: int | None = None,
    delay: bool = True,
) -> Schedule | None:
    """The ordered no-wait schedule that offloads ā_i for each i of `out`; None if it does not fit `mem_limit` bytes.

    Args:
        out: stages from 1 to L - 1.
        release: "copied" as above; "next" frees ā_i right after the forward of stage i+1, and compute waits for the
            copy.
        ahead: compute operations between the start of a prefetch and its need (0: just before it), regardless of
            memory; None for as early as memory allows.
        delay: whether compute may wait for a copy out if memory is needed; if not, such a schedule does not fit.
    """
    return _Walk(chain, mem_limit, frozenset(out)).run(release, ahead, delay)


class _Walk:
    """One pass over the compute operations t = 0..2L-1; B_i is t = 2L - i, and ā_v is needed back at t = 2L - v - 1."""

    def __init__(self, chain: Chain, mem_limit: int, out: frozenset[int]) -> None:
        c = arrays(chain)
        self.chain, self.L, self.limit, self.out = chain, len(chain), mem_limit, out
        m_F, m_B = needs(chain)
        self.need = moving_needs(chain) if out else m_F[1:] + m_B[:0:-1]
        self.size: list[int] = c.saved[:, 0].tolist()
        self.u_F: list[float] = c.u_F.tolist()
        self.u_B: list[float] = c.u_B[:, 0].tolist()
        self.compute = self.copied = 0.0  # ends of what has been issued
        self.lanes = Lanes(chain.duplex, (1.0, 1.0))
        self.copy_end = [0.0] * (self.L + 1)
        self.away: list[int] = []  # on the host only, by rising stage
        self.away_bytes = 0
        self.next_free = 1
        self.left = len(out)  # how many have not been freed yet
        self.returned = False  # whether a prefetch has been issued
        self.arriving: set[int] = set()
        self.ops: list[Op] = []

    def run(self, release: str, ahead: int | None, delay: bool) -> Schedule | None:
        L = self.L
        for t, need in enumerate(self.need):
            i = t + 1 if t < L else 2 * L - t
            if release == "next" or (release == "copied" and not self.returned):
                self._free_what_left(i, wait_for_it=release == "next" and t < L)
            due = [v for v in self.away if v >= i - 1] if t >= L else []
            coming = sum(self.size[v] for v in due)
            while need - self.away_bytes + coming > self.limit:
                v = self._next_to_free(i)
                if v is None or not (delay or self.copy_end[v] <= self.compute):
                    return None
                self._free(v)
            for v in reversed(due):
                self._prefetch(v)
            self._prefetch_early(t, ahead)
            if need - self.away_bytes > self.limit:
                return None  # a prefetch ahead exceeds the memory
            self._compute(t, i)
        return Schedule(max(self.compute, self.copied), tuple(self.ops))

    def _next_to_free(self, i: int) -> int | None:
        """The ā that left first of those still on the device that F_i or B_i does not use."""
        while self.next_free <= i - 2:
            if self.next_free in self.out:
                return self.next_free
            self.next_free += 1
        return None

    def _free_what_left(self, i: int, wait_for_it: bool) -> None:
        while (v := self._next_to_free(i)) is not None and (wait_for_it or self.copy_end[v] <= self.compute):
            self._free(v)

    def _free(self, v: int) -> None:
        self.ops.append(free(abar(v)))
        self.compute = max(self.compute, self.copy_end[v])
        self.copy_end[v] = 0.0
        self.away.append(v)
        self.away_bytes += self.size[v]
        self.next_free = v + 1
        self.left -= 1

    def _prefetch_early(self, t: int, ahead: int | None) -> None:
        while self.away:
            v = self.away[-1]
            due = 2 * self.L - v - 1
            if ahead is not None:
                if due - t > ahead:
                    return
            elif (self.left and t < self.L) or (
                max(self.need[t : due + 1]) - self.away_bytes + self.size[v] > self.limit
            ):
                return
            self._prefetch(v)

    def _prefetch(self, v: int) -> None:
        self._copy("h2d", v, self.chain.h2d_bandwidth)
        self.away.remove(v)
        self.away_bytes -= self.size[v]
        self.arriving.add(v)
        self.returned = True
        self.ops.append(prefetch(abar(v)))

    def _copy(self, lane: str, v: int, bandwidth: float) -> None:
        self.copy_end[v] = self.lanes.end(self.lanes.issue(lane, self.compute, self.size[v] / bandwidth))
        self.copied = max(self.copied, self.copy_end[v])

    def _compute(self, t: int, i: int) -> None:
        if t < self.L:
            self.ops.append(F_all(i))
            self.compute += self.u_F[i]
            if i in self.out:
                self._copy("d2h", i, self.chain.d2h_bandwidth)
                self.ops.append(offload(abar(i)))
            return
        for v in (i, i - 1):
            if v in self.arriving:
                self.arriving.discard(v)
                self.compute = max(self.compute, self.copy_end[v])
                self.ops.append(wait(abar(v)))
        self.ops.append(B(i))
        self.compute = max(self.compute + self.u_B[i], self.copy_end[i])
