"""Selects the fastest of several sequences within a limit; if none fits, the error names the smallest that works."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.chain import Chain
from ...core.sequence import Op, Sequence
from ...core.simulator import simulate
from ...errors import OptionError
from .refusal import refusal


def fastest(chain: Chain, mem_limit: int, policy: str, candidates: Iterable[tuple[str, tuple[Op, ...]]]) -> Sequence:
    """The candidate with the least step time within `mem_limit` bytes; ties go to the least peak, then to the first.

    Args:
        policy: name of the policy, for the error.
        candidates: pairs (description, operations); the description goes to ``meta["source"]``.

    Raises:
        InfeasibleError: if none fits; its `min_mem_limit` is the least peak among them.
    """
    best, least = None, None
    for source, ops in candidates:
        trace = simulate(chain, ops)
        least = trace.peak_bytes if least is None else min(least, trace.peak_bytes)
        key = (trace.makespan, trace.peak_bytes)
        if trace.peak_bytes <= mem_limit and (best is None or key < best[0]):
            best = (key, source, ops)
    if best is None:
        assert least is not None, "a policy proposes at least one sequence"
        raise refusal(policy, mem_limit, least)
    _, source, ops = best
    return Sequence(ops, meta={"source": f"{policy}, {source}"})


def largest_size(chain: Chain) -> int:
    """Bytes of the largest value, gradient or transient: a slot of that size holds any one of them."""
    return max(
        chain.input_bytes,
        chain.input_grad_bytes,
        *(max(s.output_bytes, s.saved_bytes, s.grad_bytes or 0) for s in chain.stages),
        *(
            max(s.forward_transient_bytes, s.checkpoint_transient_bytes or 0, s.backward_transient_bytes)
            for s in chain.stages
        ),
    )


def too_few_slots(slots: int) -> OptionError:
    """The error if every size is rounded up to a slot and there are fewer slots than an operation has operands."""
    return OptionError(
        f"slots is {slots}: every size takes at least a slot, so nothing fits at any limit; give at least 10 or so"
    )
