"""POFO as published: recompute and offload by one dynamic program of N = 50 slots.

Source: the supplement of the NeurIPS 2021 paper on combining both, B.1 (forward phase, OC), B.2 (loss) and B.3
(backward phase, C_A); `solver/kernels/pofo.pyx` has the recurrences beside their equations. Assumptions of the paper:
what is kept stays until its backward; only stage inputs move, out in the forward phase and back in the backward phase;
one bandwidth β both ways; memory is released while it leaves and taken while it comes; "N = 50 values is enough".

Interpretation:

- Slots are M_GPU / N bytes and *every* size is rounded up separately: values, gradients, transients, and the rest of
  the backlogs A_F, A_B and Δ after each step (the supplement only says "discretized"; this keeps every state sound).
- a_0 is the input I of stage 1, is kept and never moves. a_L stays with the caller, so it is added to the gradient in
  every backward-phase need but stage L's own. β is the slower direction's.
- No smaller forms of stages: the paper has none.
- The program decides which values are kept, moved and recomputed. The decoder of `solve` makes operations of this, with
  whole values at exact bytes on a link with two directions; a value that the program moves leaves only if its room is
  needed. The machine's time therefore differs from the program's (`predicted_time` in the sequence's meta).

How `solve` differs: `solver.slots` rounds running sums and needs once, drains backlogs by running clocks, has a β for
each direction, and starts a search on exact bytes from the result.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from ...core.chain import Chain
from ...core.sequence import Op, Sequence
from ...core.simulator import simulate
from ...core.sizes import format_bytes
from ...errors import OptionError
from .. import remat
from ..arrays import arrays
from ..joint import forwards
from ..kernels.pofo import Kernel
from ..plan_codes import evaluator, from_forwards, to_ops
from ..slots import parse_slots
from .choose import largest_size, too_few_slots
from .refusal import refusal

SLOTS = 50
TABLE_BYTES = 8 << 30


def costs(chain: Chain, mem_limit: int, N: int) -> SimpleNamespace:
    """The chain in slots of ``mem_limit / N`` bytes, each size rounded up; names and units are those of
    `solver/kernels/pofo.pyx`."""
    c, L = arrays(chain), len(chain)

    def up(sizes: np.ndarray) -> np.ndarray:
        slots = [min(N + 1, -(-int(size) * N // mem_limit)) for size in sizes]
        return np.array(slots, dtype=np.int32)

    out, saved, grad = up(c.out), up(c.saved[:, 0]), up(c.grad)
    o_F, o_ck, o_B = up(c.f_transient[:, 0]), up(c.ck_transient), up(c.b_transient[:, 0])
    beta = min(chain.d2h_bandwidth, chain.h2d_bandwidth) * N / mem_limit
    U = np.cumsum(c.u_F)
    held = (grad + out[L] * (np.arange(L + 1) < L)).astype(np.int32)
    step, most, rest = (np.zeros((L + 1, L + 1), dtype=np.int32) for _ in range(3))
    late, early = np.zeros((L + 1, L + 1)), np.zeros((L + 1, L + 1))
    for i in range(1, L):
        q = slice(i, L)
        step[i, q] = out[q] + o_ck[q] + np.concatenate([[0], out[i : L - 1]])
        most[i, q] = np.maximum.accumulate(step[i, q])
        rest[i, i + 1 : L] = np.maximum.accumulate(step[i, i + 1 : L])
        early[i, q] = np.maximum.accumulate(step[i, q] - beta * (U[i - 1 : L - 1] - U[i - 1]))
        late[i, q] = np.maximum.accumulate(step[i, q] + beta * U[q]) - beta * U[q]
    return SimpleNamespace(
        L=L,
        N=N,
        beta=beta,
        U=U,
        u_again=c.u_again,
        u_B=np.ascontiguousarray(c.u_B[:, 0]),
        out=out,
        saved=saved,
        all_F=saved + o_F,
        need_B=(saved + o_B + held + np.concatenate([[0], grad[:-1]])).astype(np.int32),
        held=held,
        step=step,
        most=most,
        rest=rest,
        late=late,
        early=early,
        row=remat.rows(L, L),
    )


def fill(table: SimpleNamespace) -> Kernel:
    """Fill both tables, stage by stage from the last; Python runs between stages, so that Ctrl-C works."""
    L, N = table.L, table.N
    C = np.full((max(1, L * (L - 1) // 2), N + 1, N + 1), math.inf)
    OC = np.full((L + 1, 2, N + 1, N + 1, N + 1), math.inf)
    kernel = Kernel(table, C, OC)
    for i in range(L - 1, 0, -1):
        kernel.fill_backward(i)
    for i in range(L, 0, -1):
        kernel.fill_forward(i)
    return kernel


def predicted(kernel: Kernel) -> float:
    """Seconds of OC_0(1, 0, 0, 0), the program's own prediction; infinite if nothing fits its slots."""
    return kernel.forward(1, 0, 0, 0, 0)[0]


def pofo(chain: Chain, mem_limit: int, slots: int = SLOTS) -> Sequence:
    """The published program's optimum at `slots` slots, as operations.

    Raises:
        InfeasibleError: if the program finds nothing; its `min_mem_limit` is the smallest limit at which it would, to
            within one slot. OptionError: if `slots` are too few for any limit, or too many for 8 GiB of tables.
    """
    slots = parse_slots(slots, "slots")
    L = len(chain)
    size = 8 * (slots + 1) ** 2 * (L * (L - 1) // 2 + 2 * (L + 1) * (slots + 1))
    if size > TABLE_BYTES:
        raise OptionError(
            f"slots is {slots}: the tables of {L} stages would take {format_bytes(size)}, more than"
            f" {format_bytes(TABLE_BYTES)}; give fewer slots"
        )
    kernel = fill(costs(chain, mem_limit, slots))
    seconds = predicted(kernel)
    ops: tuple[Op, ...] | None = None
    if math.isfinite(seconds):
        ops = _decoded(chain, mem_limit, from_forwards(chain, forwards(L, kernel)))
    if ops is None:
        raise refusal("pofo", mem_limit, least_limit(chain, mem_limit, slots), slots)
    return Sequence(ops, meta={"source": f"pofo, {slots} slots", "predicted_time": seconds})


def _decoded(chain: Chain, mem_limit: int, codes: np.ndarray) -> tuple[Op, ...] | None:
    rows = evaluator(chain, mem_limit, codes.shape[1], most_ops=2 * len(chain) ** 2 + 64).operations(codes)
    ops = None if rows is None else to_ops(rows)
    return ops if ops is not None and simulate(chain, ops).peak_bytes <= mem_limit else None


def least_limit(chain: Chain, mem_limit: int, slots: int) -> int:
    """The smallest limit found above `mem_limit` at which the program has an answer: the first at which every operation
    fits, then one slot more at a time."""
    low, high = mem_limit, 2 * mem_limit
    while not _operations_fit(costs(chain, high, slots)):
        if high > slots * largest_size(chain):
            raise too_few_slots(slots)
        low, high = high, 2 * high
    while high - low > max(1, high // 500):
        middle = (low + high) // 2
        low, high = (low, middle) if _operations_fit(costs(chain, middle, slots)) else (middle, high)
    while not math.isfinite(predicted(fill(costs(chain, high, slots)))):
        high += -(-high // slots)  # rare: backlogs of copies leave no room for a checkpoint
    return high


def _operations_fit(t: SimpleNamespace) -> bool:
    """Whether every operation can fit with nothing in transit: the recurrences with peaks in place of times."""
    L, N = t.L, t.N
    P = np.zeros((L + 2, L + 1), dtype=np.int64)  # slots that C_A(i, j) needs beyond A
    for i in range(L - 1, 0, -1):
        for j in range(i, L):
            best = max(t.all_F[i] + t.held[j], t.need_B[i], t.saved[i] + P[i + 1, j] if i < j else 0)
            if i < j:
                sweeps = np.maximum(t.most[i, i:j] + t.held[j], P[i, i:j])
                best = min(best, int(np.maximum(sweeps, t.out[i:j] + P[i + 1 : j + 1, j]).min()))
            P[i, j] = best
    W = np.zeros((L + 2, 2), dtype=np.int64)  # slots that OC_x(i) needs beyond A
    for i in range(L, 0, -1):
        for x in (0, 1):
            size = int(t.saved[i - 1] if x else t.out[i - 1])
            stay = size if i == 1 else 0  # a_0 never moves; any other input may, and then only the operations hold it
            best = max(t.all_F[i] + size, t.need_B[i] + size, stay + W[i + 1, 1] if i < L else 0)
            for j in range(i, L):
                best = min(best, max(t.step[i, i] + size, t.rest[i, j] + stay, size + P[i, j], stay + W[j + 1, 0]))
            W[i, x] = best
    return bool(W[1, 0] <= N)
