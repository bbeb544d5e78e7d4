"""What a policy returns: the fastest of its sequences within a limit; if none fits, the error names one that works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...core.chain import Chain
from ...core.sequence import Op, Sequence
from ...core.simulator import simulate
from ...errors import OptionError
from ..arrays import arrays
from ..bounds import refusal
from ..search import judged

STEPS = 10
T = TypeVar("T")


def fastest(chain: Chain, mem_limit: int, policy: str, candidates: Iterable[tuple[str, tuple[Op, ...]]]) -> Sequence:
    """The candidate with the least step time within `mem_limit` bytes; ties go to the least peak, then to the first.

    Args:
        policy: name of the policy, for the error.
        candidates: pairs (description, operations); the description goes to ``meta["source"]``.

    Raises:
        InfeasibleError: if none fits; its `min_mem_limit` is the least peak among them.
    """
    tried = []
    for source, ops in candidates:
        trace = simulate(chain, ops)
        tried.append((trace.makespan, trace.peak_bytes, source, ops))
    fitting = [one for one in tried if one[1] <= mem_limit]
    if not fitting:
        raise refusal(f"with policy {policy}", mem_limit, min(peak for _, peak, *_ in tried))
    *_, source, ops = min(fitting, key=lambda one: one[:2])
    return Sequence(ops, meta={"source": f"{policy}, {source}"})


def within(
    policy: str,
    mem_limit: int,
    make: Callable[[int], T | None],
    most: int,
    least: int = 0,
    fits: Callable[[int], object] | None = None,
    steps: int = STEPS,
    known: str = "at least",
) -> T:
    """What `make` makes of a limit of `mem_limit` bytes.

    Args:
        most: bytes with which it makes something, as a guess. least: bytes below which it makes nothing. fits: whether
            it does, where that is found faster. known: how well the limit in the error is known.

    Raises:
        InfeasibleError: if it makes nothing; names a limit with which it does, by `steps` of bisection: nearly the
            smallest if fitting is monotone.
    """
    made = make(mem_limit) if mem_limit >= least else None
    if made is None:
        works, low = fits or (lambda limit: make(limit) is not None), max(mem_limit, least - 1)
        while not works(most):
            low, most = max(low, most), 2 * most
        for _ in range(steps):
            middle = (low + most) // 2
            if middle > low:
                low, most = (low, middle) if works(middle) else (middle, most)
        raise refusal(f"with policy {policy}", mem_limit, most, known)
    return made


def by_slots(
    policy: str, chain: Chain, mem_limit: int, slots: int, optimum: Callable[[int], tuple[float, np.ndarray | None]]
) -> Sequence:
    """The sequence of a program that rounds sizes up to slots. optimum: its (seconds, plan) within a limit.

    Raises:
        InfeasibleError: if the program finds nothing; its `min_mem_limit` is the smallest limit at which it would, to
            within one slot. OptionError: if there are fewer slots than an operation has operands.
    """

    def make(limit: int) -> Sequence | None:
        seconds, codes = optimum(limit)
        made = None if codes is None else judged(chain, limit, codes, f"{policy}, {slots} slots")
        return None if made is None else replace(made.sequence, meta={"source": made.source, "predicted_time": seconds})

    c = arrays(chain)
    sizes = c.out, c.grad, c.saved, c.f_transient, c.ck_transient, c.b_transient
    a_slot_each = slots * (chain.input_bytes + max(int(several.max()) for several in sizes))
    if make(mem_limit) is None and make(a_slot_each + 1) is None:
        raise OptionError(
            f"slots is {slots}: every size takes at least a slot, so nothing fits at any limit; give at least 10 or so"
        )
    most, steps = 2 * max(mem_limit, chain.input_bytes), max(STEPS, (2 * slots).bit_length())
    return within(f"{policy} at {slots} slots", mem_limit, make, most, steps=steps, known="about")
