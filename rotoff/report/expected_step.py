"""The step that texts and pictures show: a planned model's expected figures if there are any, otherwise the simulated.

The machine counts the batch and charges some bytes that a step is known not to hold, and its chain includes the
runtime's overhead, which a step that keeps everything does not have. `Checkpointable.sequence` stores the expected
figures in its meta, so that ``display()``, the timeline and the log show the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.chain import Chain
from ..core.chain_fields import bytes_of, number
from ..core.sequence import Op
from ..core.sequence import Sequence as Plan
from ..core.simulator import Trace, simulate
from ..core.sizes import parse_bytes
from ..errors import ChainError, LimitError

EXPECTED = "expected"  # in a sequence's meta


class ShownStep(NamedTuple):
    """The predicted step, the measured one with bytes in the same terms, the limit, and the seconds of keeping
    everything."""

    trace: Trace
    measured: Trace | None
    mem_limit: int | None
    keep_all_time: float


class _Expected(NamedTuple):
    """What a plan's meta says of its step."""

    mem_limit: int | None
    peak_bytes: int
    keep_all_time: float
    memory: list[int]


def with_expected(
    chain: Chain, plan: Plan, levels: Sequence[int], peak_bytes: int, mem_limit: int | None, keep_all_time: float
) -> Plan:
    """`plan` with the expected figures in its meta: the bytes held during each operation, the user's limit, and the
    seconds of keeping everything."""
    said = {
        "machine": _figures(simulate(chain, plan)),  # to recognize another plan or chain
        "mem_limit": mem_limit,
        "peak_bytes": peak_bytes,
        "keep_all_time": keep_all_time,
        "memory": list(levels),
    }
    return replace(plan, meta={**plan.meta, EXPECTED: said})


def shown_step(
    chain: Chain, sequence: Iterable[Op], measured: Trace | None = None, mem_limit: int | str | None = None
) -> ShownStep:
    """The step to show for `sequence`.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    trace = simulate(chain, sequence)
    said = _read(sequence.meta.get(EXPECTED), trace) if isinstance(sequence, Plan) else None
    if mem_limit is None and isinstance(sequence, Plan):
        mem_limit = sequence.mem_limit if said is None else said.mem_limit
    limit = None if mem_limit is None else parse_bytes(mem_limit)
    if said is None:
        return ShownStep(trace, measured, limit, chain.compute_time)

    def told(step: Trace) -> Trace:
        events = tuple(replace(event, memory=held) for event, held in zip(step.events, said.memory, strict=True))
        return replace(step, events=events, peak_bytes=said.peak_bytes)

    return ShownStep(told(trace), measured and told(measured), limit, said.keep_all_time)


def _read(said: Any, trace: Trace) -> _Expected | None:
    """What a plan's meta says of its step; None if that is another one, or nothing that this module wrote."""
    if not isinstance(said, Mapping) or said.get("machine") != _figures(trace):
        return None
    try:
        limit, levels = said["mem_limit"], [bytes_of(held, "memory", EXPECTED) for held in said["memory"]]
        found = _Expected(
            None if limit is None else parse_bytes(bytes_of(limit, "mem_limit", EXPECTED)),
            bytes_of(said["peak_bytes"], "peak_bytes", EXPECTED),
            number(said["keep_all_time"], "keep_all_time", EXPECTED),
            levels,
        )
    except (LookupError, TypeError, ChainError, LimitError):
        return None
    return found if len(levels) == len(trace.events) else None


def _figures(trace: Trace) -> list[float]:
    return [len(trace.events), trace.makespan, trace.peak_bytes, trace.host_peak_bytes]
