"""The fastest of several sequences that the machine accepts at a limit; or the smallest limit at which one of them fits."""

from __future__ import annotations

from collections.abc import Iterable

from ...chain import Chain
from ...errors import InfeasibleError
from ...sequence import Op, Sequence
from ...simulator import simulate
from ...sizes import format_bytes


def fastest(chain: Chain, mem_limit: int, policy: str, candidates: Iterable[tuple[str, tuple[Op, ...]]]) -> Sequence:
    """The candidate of least step time within `mem_limit` bytes, then of least peak, then the first.

    Args:
        policy: the name that the sequence carries as its mode.
        candidates: pairs (what it is, operations); the first goes to ``meta["source"]``.

    Raises:
        InfeasibleError: where none fits; its `min_mem_limit` is the least peak among them.
    """
    best, least = None, None
    for source, ops in candidates:
        trace = simulate(chain, ops)
        least = trace.peak_bytes if least is None else min(least, trace.peak_bytes)
        key = (trace.makespan, trace.peak_bytes)
        if trace.peak_bytes <= mem_limit and (best is None or key < best[0]):
            best = (key, source, ops, trace)
    if best is None:
        assert least is not None, "a policy proposes at least one sequence"
        raise InfeasibleError(
            f"needs at least {format_bytes(least)} ({least} bytes) with policy {policy}; the limit is"
            f" {format_bytes(mem_limit)} ({mem_limit} bytes)",
            least,
        )
    _, source, ops, trace = best
    meta = {
        "makespan": trace.makespan,
        "peak_bytes": trace.peak_bytes,
        "host_peak_bytes": trace.host_peak_bytes,
        "source": source,
    }
    return Sequence(ops, mode=policy, mem_limit=mem_limit, meta=meta)
