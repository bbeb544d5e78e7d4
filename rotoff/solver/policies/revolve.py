"""Revolve: the optimal checkpoints of a homogeneous chain, as a program and in closed form.

Sources: the slides *Memory Saving Strategies for Deep Neural Network Training* (2021), "Single Adjoint Chain
Computation problem"; Griewank and Walther, *Algorithm 799: Revolve* (2000), for the closed form.

Symbols: ℓ forwards that can be swept (stages 1..ℓ; stage ℓ + 1 is the turn, so a chain of L stages has ℓ = L − 1), c
slots for a_i, including that of the segment's input; u_f one forward, u_b one backward with the forward that saves its
tensors (``F_all i`` and ``B i`` run in succession, so no ā outlives them).

Opt_0(ℓ, 1) = ℓ(ℓ+1)/2 u_f + (ℓ+1) u_b; Opt_0(0, c) = u_b;
Opt_0(ℓ, c) = min over 1 ≤ i ≤ ℓ of i u_f + Opt_0(ℓ − i, c − 1) + Opt_0(i − 1, c).
(The slides begin at Opt_0(1, c) = u_f + 2 u_b, which is the same.)
In closed form, with the least r for which C(c + r, c) ≥ ℓ + 1: Opt_0(ℓ, c) = (r (ℓ+1) − C(c + r, c + 1)) u_f + (ℓ+1)
u_b.

Interpretation: stages of a network differ, and the program ignores that: it counts slots of any size. The number
of slots is the one whose sequence is the fastest that the machine accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import comb

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Op, Sequence
from .choose import fastest
from .segments import one_by_one, sweep


@lru_cache(maxsize=1 << 16)
def swept(length: int, slots: int) -> int:
    """Forwards swept by the optimum for ℓ = `length` and c = `slots` ≥ 1, in closed form."""
    r = 0
    while comb(slots + r, slots) < length + 1:
        r += 1
    return r * (length + 1) - comb(slots + r, slots + 1)


def first_cut(length: int, slots: int) -> int:
    """The smallest i at which the program's minimum is attained; slots > 1, length > 0."""
    least = swept(length, slots)
    return next(i for i in range(1, length + 1) if i + swept(length - i, slots - 1) + swept(i - 1, slots) == least)


def operations(L: int, slots: int) -> tuple[Op, ...]:
    """The optimal sequence of L stages with c = `slots`; a_0 has the first slot."""
    made: list[Op] = []
    waiting = [(1, L, slots)]
    while waiting:
        i, j, c = waiting.pop()
        if c == 1 or i == j:
            made += one_by_one(i, j)
            continue
        k = i - 1 + first_cut(j - i, c)
        made += sweep(i, k)
        waiting += [(i, k, c), (k + 1, j, c - 1)]
    return tuple(made)


def revolve(chain: Chain, mem_limit: int, slots: int | None = None) -> Sequence:
    """Griewank and Walther's optimum for a homogeneous chain, applied to any chain.

    Args:
        slots: c, outputs held at a time, a_0 included; by default the count that is fastest within `mem_limit`.
    """
    return fastest(chain, mem_limit, "revolve", _candidates(len(chain), slots))


def _candidates(L: int, slots: int | None) -> Iterator[tuple[str, tuple[Op, ...]]]:
    seen = None
    for c in range(1, L + 1) if slots is None else [whole_number(slots, "slots")]:
        ops = operations(L, c)
        if ops != seen:
            yield f"{c} slots", ops
        seen = ops
        if swept(L - 1, c) == L - 1:
            return  # every forward is swept once, so more slots gain nothing
