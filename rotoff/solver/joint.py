"""Recompute and offload together: the recurrences OC and C_A of the NeurIPS 2021 supplement at N slots.

The recurrences are in `rotoff/_dp.pyx` with their equations, the rules of rounding in `solver.slots`. The paper's β is
two numbers here, out (β_F) and in (β_B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from .._dp import Joint
from ..core.chain import Chain
from ..core.sizes import format_bytes
from ..errors import OptionError
from . import remat
from .plan_codes import MOVE, from_forwards
from .slots import ROUNDINGS, Slots

TABLE_BYTES = 8 << 30


def program(chain: Chain, mem_limit: int, N: int, rounding: str = "up") -> Joint:
    """The recurrences at N slots of a limit, which must exceed a_0.

    Raises:
        OptionError: if the tables would not fit in memory.
    """
    if (size := table_bytes(chain, N)) > TABLE_BYTES:
        raise OptionError(
            f"the tables of {N} slots and {len(chain)} stages would take {format_bytes(size)}, more than"
            f" {format_bytes(TABLE_BYTES)}; give fewer slots"
        )
    return Joint(Slots(chain, mem_limit, N, rounding))


def table_bytes(chain: Chain, N: int) -> int:
    """Bytes of both tables."""
    L, X = len(chain), 2 + max(len(s.forms) for s in chain.stages)
    C = L * L // 2 * (N + 1) * (N + 2) // 2
    OC = (L + 2) * X * (N + 1) * (N + 2) * (2 * N + 3) // 6
    return 8 * (C + 2 * OC)


def solve_slots(chain: Chain, mem_limit: int, N: int, rounding: str = "up") -> tuple[float, np.ndarray | None]:
    """(cost in seconds, plan) of OC_0(1, 0, 0, 0) at N slots; (infinity, None) if nothing fits."""
    if mem_limit <= chain.input_bytes:
        return math.inf, None
    kernel = program(chain, mem_limit, N, rounding)
    cost, end = kernel.forward()
    return cost, from_forwards(chain, forwards(kernel, end)) if math.isfinite(cost) else None


def forwards(kernel: Joint, end: int) -> list[tuple[int, int]]:
    """The forwards of the way to the state `end` and back, as (stage, code); a value that moves has MOVE where it is
    made."""
    i, *last, end = kernel.state(end)
    way = [(i, *last)]
    while i > 1:
        i, *last, end = kernel.state(end)
        way.append((i, *last))
    done: list[tuple[int, int]] = []
    waiting: list[tuple[int, int, int, int]] = []  # segments to recompute: i, j, A, Δ
    for (i, x, A, _, A_B), (after, x_after, A_after, _, _) in pairwise(reversed(way)):
        size = kernel.size(i, x)
        if size and A_after == A:
            stage, code = done[-1]
            done[-1] = (stage, code | MOVE)
        if x_after:
            done += remat.first_codes(i, 0, x_after - 1)
        else:
            done += remat.first_codes(i, after - 1)
            waiting.append((i, after - 1, A + size, A_B))
    while waiting:
        i, j, A, Delta = waiting.pop()
        _, cut, form, A_first, Delta_first = kernel.backward(i, j, A, Delta)
        done += remat.first_codes(i, cut, form)
        if cut:
            waiting.append((i, cut, A, Delta))
        if i < j:
            waiting.append(((cut or i) + 1, j, A_first, Delta_first))
    return done


def proposals(chain: Chain, limit: int, slots: int) -> Iterator[tuple[str, np.ndarray]]:
    """Optima of the recurrences with both rounding rules."""
    for rounding in ROUNDINGS:
        _, codes = solve_slots(chain, limit, slots, rounding)
        if codes is not None:
            yield f"joint-{rounding}", codes
