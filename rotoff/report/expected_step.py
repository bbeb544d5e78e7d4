"""The step that texts and pictures show: a planned model's expected figures if there are any, otherwise the simulated.

The machine counts the batch and charges some bytes that a step is known not to hold. `Checkpointable.sequence` stores
the expected figures in its meta, so that ``display()``, the timeline and the log show the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.chain import Chain
from ..core.chain_fields import bytes_of
from ..core.sequence import Op
from ..core.sequence import Sequence as Plan
from ..core.simulator import Trace, simulate
from ..core.sizes import parse_bytes
from ..errors import ChainError, LimitError
from ..solver import keep_all

EXPECTED = "expected"  # in a sequence's meta


class ShownStep(NamedTuple):
    """The predicted step, the measured one with bytes in the same terms, the limit, and the seconds of a step that
    keeps everything, with the updates that the chain has."""

    trace: Trace
    measured: Trace | None
    mem_limit: int | None
    keep_all_time: float

    @property
    def overhead(self) -> float:
        """The step's time, if it was measured that, over the time of keeping everything, less 1."""
        shown = self.measured or self.trace
        return shown.makespan / self.keep_all_time - 1 if self.keep_all_time else 0.0


class _Expected(NamedTuple):
    """What a plan's meta says of its step."""

    mem_limit: int | None
    peak_bytes: int
    memory: list[int]


def keeping_all(chain: Chain) -> Trace:
    """The step of plain PyTorch."""
    return simulate(chain, keep_all(chain))


def with_expected(chain: Chain, plan: Plan, levels: Sequence[int], peak_bytes: int, mem_limit: int | None) -> Plan:
    """`plan` with the expected figures in its meta: the bytes held during each operation, and the user's limit."""
    said = {
        "machine": _figures(simulate(chain, plan)),  # to recognize another plan or chain
        "mem_limit": mem_limit,
        "peak_bytes": peak_bytes,
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
    whole = keeping_all(chain).makespan
    if said is None:
        return ShownStep(trace, measured, limit, whole)

    def told(step: Trace) -> Trace:
        events = tuple(replace(event, memory=held) for event, held in zip(step.events, said.memory, strict=True))
        return replace(step, events=events, peak_bytes=said.peak_bytes)

    return ShownStep(told(trace), measured and told(measured), limit, whole)


def held(trace: Trace) -> list[tuple[float, int, int, int]]:
    """(seconds, bytes on the device, on the host, of parameters on the device), each from its time on until the next
    one's.

    Program order decides bytes: those of a copy count when the compute lane issues it, not when the copy runs. An
    operation that takes no time shows only the bytes after it, and a peak if it makes one.
    """
    instants: dict[float, list[tuple[int, int, int]]] = {}
    clock = 0.0
    for event in trace.events:
        if event.lane == "compute":
            clock = max(clock, event.start)
        instants.setdefault(clock, []).append((event.memory, event.host_memory, event.parameter_memory))
        if event.lane == "compute":
            clock = event.end
    points: list[tuple[float, int, int, int]] = []
    for time, seen in instants.items():
        most, last = max(seen), seen[-1]
        if most[0] > max(last[0], points[-1][1] if points else 0):
            points.append((time, *most))
        points.append((time, *last))
    return [*points, (clock, *points[-1][1:])]


def _read(said: Any, trace: Trace) -> _Expected | None:
    """What a plan's meta says of its step; None if that is another one, or nothing that this module wrote."""
    try:
        if said["machine"] != _figures(trace) or len(said["memory"]) != len(trace.events):
            return None
        limit, levels = said["mem_limit"], [bytes_of(held, "memory", EXPECTED) for held in said["memory"]]
        limit = None if limit is None else parse_bytes(bytes_of(limit, "mem_limit", EXPECTED))
        return _Expected(limit, bytes_of(said["peak_bytes"], "peak_bytes", EXPECTED), levels)
    except (LookupError, TypeError, ChainError, LimitError):
        return None


def _figures(trace: Trace) -> list[float]:
    return [len(trace.events), trace.makespan, trace.peak_bytes, trace.host_peak_bytes]
