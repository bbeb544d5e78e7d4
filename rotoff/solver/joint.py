"""Recompute and offload together: the recurrences OC and C_A of the NeurIPS 2021 supplement at N slots.

`costs` rounds (by the rules of `solver.slots`), `fill` runs the kernel, `solve_slots` backtracks; the recurrences
themselves are in `rotoff/_dp.pyx` with their equations. The paper's β is two numbers here, out (β_F) and in
(β_B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from .._dp import Joint
from ..core.chain import Chain
from ..core.sizes import format_bytes
from ..errors import OptionError
from . import remat
from .arrays import arrays
from .kernels.pofo import Kernel
from .plan_codes import MOVE, from_forwards
from .pool import THREADS
from .slots import ROUNDINGS, clock, discretize, needed

TABLE_BYTES = 4 << 30
QUICK_WORK = 1.5e7
QUICK_REACH = 32
# most slots that the link copies in one step: a faster link hides every copy, and larger sums would lose the low digits
MOST_DRAINED = 1e12


def costs(chain: Chain, mem_limit: int, N: int, rounding: str, reach: int) -> SimpleNamespace:
    """The chain in slots at a limit of `mem_limit` bytes, with recomputed segments of up to `reach` stages; names and
    units are those of `rotoff/_dp.pyx`."""
    c, L = arrays(chain), len(chain)
    slots = discretize(c, mem_limit, N, rounding)
    N = slots.N
    room, need = slots.room, remat.needs(c)
    total = float((c.u_F + c.u_B.max(axis=1)).sum())
    fastest_link = MOST_DRAINED / total if total else math.inf
    beta_F, beta_B = (min(beta * N / room, fastest_link) for beta in (chain.d2h_bandwidth, chain.h2d_bandwidth))
    own = np.zeros((L + 1, L + 1))  # own[i, q]: F_ck i (q = i) or F_∅ q, real slots
    rest = np.zeros((L + 1, L + 1), dtype=np.int64)  # bytes of F_∅ i+1..k
    late, early = np.zeros((L + 1, L + 1)), np.zeros((L + 1, L + 1))
    U = np.cumsum(c.u_F)
    made = c.out + c.ck_transient
    for i in range(1, L):
        bytes_of = made[i:L] + np.concatenate([[0], c.out[i : L - 1]])
        rest[i, i + 1 : L] = np.maximum.accumulate(bytes_of[1:])
        own[i, i:L] = bytes_of * (N / room)
        # Σ_{i≤r<q} u_F(r) = U(q−1) − U(i−1); Σ_{q<r≤k} u_F(r) = U(k) − U(q).
        early[i, i:L] = np.maximum.accumulate(own[i, i:L] - beta_F * (U[i - 1 : L - 1] - U[i - 1]))
        late[i, i:L] = np.maximum.accumulate(own[i, i:L] + beta_B * U[i:L]) - beta_B * U[i:L]
    clock_B = clock(c.u_B[:, 0], beta_B)
    by_form = np.diff(clock_B, prepend=0)[:, None] + np.floor(beta_B * (c.u_B - c.u_B[:, :1]) + 0.5).astype(np.int64)
    return SimpleNamespace(
        L=L,
        N=N,
        reach=reach,
        K=c.saved.shape[1],
        beta_F=beta_F,
        beta_B=beta_B,
        U=U,
        u_again=c.u_again,
        base=np.cumsum(c.u_F + c.u_B[:, 0]),
        least=np.cumsum(c.u_again + c.fastest),
        u_B=c.u_B,
        n_forms=c.n_forms,
        out=slots.out,
        saved=slots.saved,
        clock_F=clock(c.u_F, beta_F),
        clock_B=np.clip(by_form, 0, 1 << 30),
        clock=clock(c.u_F + c.u_B[:, 0], beta_B),
        need_all=needed(need.all, slots),
        need_B=needed(need.b, slots),
        need_ck=needed(need.ck, slots),
        need_rest=needed(rest, slots),
        bytes_held=need.held,
        bytes_all=need.all,
        bytes_ck=need.ck,
        room=room,
        late=late,
        early=early,
        held=need.held * (N / room),
        row=remat.rows(L, reach),
    )


def fill(table: SimpleNamespace) -> Joint:
    """Fill both tables in two threads; OC only at the states that its answer can reach. Python runs between rows, so
    that Ctrl-C works."""
    L, N, X = table.L, table.N, table.K + 1
    C = np.full((max(1, table.row[L + 1] + L + 1), N + 1, N + 1), math.inf)
    OC = np.empty((L + 1, X, N + 1, N + 1, N + 1))  # only states that can be reached are ever read
    reached = np.zeros(OC.shape, dtype=np.int8)
    reached[1, 0, 0, 0, 0] = 1
    kernel = Joint(table, C, OC, reached)
    with ThreadPoolExecutor(THREADS) as pool:
        for d in range(min(table.reach, L - 1)):
            cuts = [1 + (L - 1 - d) * part // THREADS for part in range(1 + THREADS)]
            _finish([pool.submit(kernel.fill_backward, d, low, high) for low, high in pairwise(cuts)])
        for mark, stages in ((True, range(1, L)), (False, range(L, 0, -1))):
            for i in stages:
                _finish([pool.submit(kernel.fill_forward, i, part, THREADS, mark) for part in range(THREADS)])
    return kernel


def _finish(jobs: Sequence[Future[None]]) -> None:
    """Wait for `jobs`; an interrupt waits only for those that are already running."""
    try:
        for job in jobs:
            job.result()
    except BaseException:
        for job in jobs:
            job.cancel()
        raise


def table_bytes(chain: Chain, N: int, reach: int) -> int:
    """Bytes of both tables."""
    L, X = len(chain), 2 + max(len(s.forms) for s in chain.stages)
    return 8 * (L * min(L, 2 * reach) // 2) * (N + 1) ** 2 + 9 * (L + 1) * X * (N + 1) ** 3


def solve_slots(
    chain: Chain, mem_limit: int, N: int, rounding: str = "up", reach: int | None = None
) -> tuple[float, np.ndarray | None]:
    """(cost in seconds, plan) of OC_0(1, 0, 0, 0) at N slots; (infinity, None) if nothing fits.

    reach: most stages that are recomputed from one input; None for any number.
    """
    if mem_limit <= chain.input_bytes:
        return math.inf, None
    table = costs(chain, mem_limit, N, rounding, max(1, min(reach or len(chain), len(chain) - 1)))
    kernel = fill(table)
    cost = kernel.forward(1, 0, 0, 0, 0)[0]
    return cost, from_forwards(chain, forwards(len(chain), kernel)) if math.isfinite(cost) else None


def forwards(L: int, kernel: Joint | Kernel) -> list[tuple[int, int]]:
    """The forwards of an optimum in program order, as (stage, code); a value that moves has MOVE where it is made."""
    done: list[tuple[int, int]] = []
    waiting: list[tuple[int, int, int, int]] = []  # segments to recompute: i, j, A, Δ
    i, x, A, A_F, A_B = 1, 0, 0, 0, 0
    while i <= L:
        _, form, cut, moved, kept, *after = kernel.forward(i, x, A, A_F, A_B)
        if moved:
            stage, code = done[-1]
            done[-1] = (stage, code | MOVE)
        if form >= 0:
            done += remat.segment_codes("all", i, form)
            i, x = i + 1, 1 + form
        else:
            waiting.append((i, cut, kept, A_B))
            done += remat.segment_codes("ck", i, cut)
            i, x = cut + 1, 0
        A, A_F, A_B = after
    while waiting:
        i, j, A, D = waiting.pop()
        _, form, cut, A1, D1 = kernel.backward(i, j, A, D)
        if form >= 0:
            done += remat.segment_codes("all", i, form)
            if i < j:
                waiting.append((i + 1, j, A1, D1))
        else:
            done += remat.segment_codes("ck", i, cut)
            waiting += [(i, cut, A, D), (cut + 1, j, A1, D1)]
    return done


def quick(chain: Chain) -> tuple[int, int]:
    """(slots, reach) for tables that take about a tenth of a second: enough if a search follows."""
    reach = min(len(chain), QUICK_REACH)
    return max(4, round(math.pow(QUICK_WORK / (len(chain) * reach), 1 / 3))), reach


def proposals(chain: Chain, limit: int, slots: int, reach: int) -> Iterator[tuple[str, np.ndarray]]:
    """Optima of the recurrences with both rounding rules.

    Raises:
        OptionError: if the tables would not fit in memory.
    """
    if (size := table_bytes(chain, slots, reach)) > TABLE_BYTES:
        raise OptionError(
            f"mem_slots is {slots}: the tables of {len(chain)} stages would take {format_bytes(size)},"
            f" more than {format_bytes(TABLE_BYTES)}; give fewer slots, or leave refine on"
        )
    for rounding in ROUNDINGS:
        _, codes = solve_slots(chain, limit, slots, rounding, reach)
        if codes is not None:
            yield f"joint-{rounding}", codes
