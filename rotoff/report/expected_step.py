"""The step that texts and pictures show: a planned model's expected figures if there are any, otherwise the simulated.

The machine counts the batch and charges some bytes that a step is known not to hold. `Checkpointable.sequence` stores
the expected figures in its meta, so that ``display()``, the timeline and the log show the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

from ..core.chain import Chain
from ..core.figures import Figures
from ..core.sequence import COMPUTES, Op
from ..core.sequence import Sequence as Plan
from ..core.simulator import Trace, simulate
from ..core.sizes import parse_bytes
from ..solver import keep_all

EXPECTED = "expected"  # in a sequence's meta


class ShownStep(NamedTuple):
    """A plan with its predicted step, the measured one with bytes in the same terms, and the predicted figures."""

    plan: Plan
    trace: Trace
    measured: Trace | None
    figures: Figures


def keep_all_step(chain: Chain) -> Trace:
    """The step of plain PyTorch."""
    return simulate(chain, keep_all(chain))


def with_expected(chain: Chain, plan: Plan, levels: Sequence[int], figures: Figures) -> Plan:
    """`plan` with the expected figures in its meta, and the bytes held during each operation."""
    # the machine's figures, to recognize another plan or chain
    said = {"machine": _machine(simulate(chain, plan)), **asdict(figures), "memory": list(levels)}
    return replace(plan, meta={**plan.meta, EXPECTED: said})


def shown_step(
    chain: Chain, sequence: Iterable[Op], measured: Trace | None = None, mem_limit: int | str | None = None
) -> ShownStep:
    """The step to show for `sequence`.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    if isinstance(sequence, Iterable) and not isinstance(sequence, Plan):
        sequence = tuple(sequence)
    trace = simulate(chain, sequence)  # which refuses what is no sequence
    plan = sequence if isinstance(sequence, Plan) else Plan(sequence)
    limit = None if mem_limit is None else parse_bytes(mem_limit)
    everything = keep_all_step(chain)
    said = _read(plan.meta.get(EXPECTED), trace)
    if said is None:
        limit = plan.mem_limit if limit is None else limit
        held = trace.peak_bytes, trace.host_peak_bytes, trace.makespan
        return ShownStep(plan, trace, measured, Figures(limit, *held, everything.makespan, everything.peak_bytes))
    figures, memory = said
    figures = figures if limit is None else replace(figures, mem_limit=limit)

    def told(step: Trace) -> Trace:
        events = tuple(event._replace(memory=held) for event, held in zip(step.events, memory, strict=True))
        return replace(step, events=events, peak_bytes=figures.peak_bytes, host_peak_bytes=figures.host_bytes)

    return ShownStep(plan, told(trace), measured and told(measured), figures)


def lanes(trace: Trace) -> dict[str, list[tuple[float, float, str, str]]]:
    """By lane that has any, and the compute lane: spans of (start, end, work, label), in seconds.

    work: "F", "R" (a forward again), "B", "U" or "H"; of a copy its lane, with " of parameters" for theirs; "idle"
    where compute waits for a copy. label: the number of the stage or group.
    """
    found: dict[str, list[tuple[float, float, str, str]]] = {"compute": []}
    clock = 0.0
    for lane in ("compute", "d2h", "h2d", "host"):
        for event, start, end in trace.spans(lane):
            op, work = event.op, "R" if event.recompute else event.op.kind.value[0]
            if lane == "compute":
                if op.kind not in COMPUTES:
                    continue
                if start > clock:
                    found[lane].append((clock, start, "idle", ""))
                clock = end
            elif lane != "host":
                work = lane + (" of parameters" if op.of else "")
            found.setdefault(lane, []).append((start, end, work, f"{op.of}{op.stage}"))
    return found


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


def _read(said: Any, trace: Trace) -> tuple[Figures, list[int]] | None:
    """The figures in a plan's meta, and the bytes held during each operation; None if they are another step's, or
    nothing that this module wrote."""
    if not isinstance(said, dict) or said.get("machine") != _machine(trace):
        return None
    return Figures(**{one.name: said[one.name] for one in fields(Figures)}), said["memory"]


def _machine(trace: Trace) -> list[float]:
    return [len(trace.events), trace.makespan, trace.peak_bytes, trace.host_peak_bytes]
