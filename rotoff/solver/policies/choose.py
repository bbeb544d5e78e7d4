"""Selects the fastest of several sequences within a limit; if none fits, the error names the smallest that works."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.chain import Chain
from ...core.sequence import Op, Sequence
from ...core.simulator import simulate
from ...errors import OptionError
from ..arrays import arrays
from .refusal import refusal


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
        raise refusal(policy, mem_limit, min(peak for _, peak, *_ in tried))
    *_, source, ops = min(fitting, key=lambda one: one[:2])
    return Sequence(ops, meta={"source": f"{policy}, {source}"})


def largest_size(chain: Chain) -> int:
    """Bytes of the largest value, gradient or transient: a slot of that size holds any one of them."""
    c = arrays(chain)
    sizes = c.out, c.grad, c.saved[:, 0], c.f_transient[:, 0], c.ck_transient, c.b_transient[:, 0]
    return max(int(several.max()) for several in sizes)


def too_few_slots(slots: int) -> OptionError:
    """The error if every size is rounded up to a slot and there are fewer slots than an operation has operands."""
    return OptionError(
        f"slots is {slots}: every size takes at least a slot, so nothing fits at any limit; give at least 10 or so"
    )
