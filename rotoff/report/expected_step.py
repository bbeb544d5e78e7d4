"""The step that texts and pictures show: what a planned model expects, in the terms of its limit, or the machine's.

The machine counts the batch and charges some bytes that a step is known not to hold, and it does not know what the
runtime itself takes. `Checkpointable.sequence` carries what is expected in its meta, so that ``display()``, the
timeline and the log tell the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..core.chain import Chain
from ..core.sequence import Op
from ..core.sequence import Sequence as Plan
from ..core.simulator import Trace, simulate
from ..core.sizes import parse_bytes

EXPECTED = "expected"  # in a sequence's meta


def with_expected(
    chain: Chain, plan: Plan, trace: Trace, levels: Sequence[int], peak_bytes: int, mem_limit: int | None
) -> Plan:
    """`plan` that says what its model expects: times of `trace`, the bytes held during each operation, and the user's
    limit."""
    said = {
        "machine": _figures(simulate(chain, plan)),  # another plan, or another chain, is not what this is of
        "mem_limit": mem_limit,
        "peak_bytes": peak_bytes,
        "makespan": trace.makespan,
        "times": [[event.start, event.end] for event in trace.events],
        "memory": list(levels),
    }
    return replace(plan, meta={**plan.meta, EXPECTED: said})


def shown_step(
    chain: Chain, sequence: Iterable[Op], measured: Trace | None = None, mem_limit: int | str | None = None
) -> tuple[Trace, Trace | None, int | None]:
    """The step that is predicted for `sequence`, the `measured` one with bytes in the same terms, and the limit.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    trace = simulate(chain, sequence)
    said: Any = sequence.meta.get(EXPECTED) if isinstance(sequence, Plan) else None
    if said is not None and said["machine"] != _figures(trace):
        said = None
    if mem_limit is None and isinstance(sequence, Plan):
        mem_limit = sequence.mem_limit if said is None else said["mem_limit"]
    limit = None if mem_limit is None else parse_bytes(mem_limit)
    if said is None:
        return trace, measured, limit

    def told(step: Trace) -> Trace:
        events = tuple(replace(event, memory=held) for event, held in zip(step.events, said["memory"], strict=True))
        return replace(step, events=events, peak_bytes=said["peak_bytes"])

    timed = tuple(
        replace(event, start=start, end=end) for event, (start, end) in zip(trace.events, said["times"], strict=True)
    )
    expected = replace(trace, events=timed, makespan=said["makespan"])
    return told(expected), measured and told(measured), limit


def _figures(trace: Trace) -> list[float]:
    return [len(trace.events), trace.makespan, trace.peak_bytes, trace.host_peak_bytes]
