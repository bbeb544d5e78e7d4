"""The machine's prediction of a step: one event for each operation, and the totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .sequence import Op
from .sizes import format_bytes

_ROUNDING = 1e-9  # relative tolerance in comparing a lane's end with the step's


class Event(NamedTuple):
    """One operation as the machine ran it.

    lane: "compute", "d2h", "h2d" or "host".
    start, end: seconds from the step's start.
    memory, host_memory: bytes held while it runs, with transients and gradients.
    recompute: whether it is a forward of a stage that had run before.
    parameter_memory: the part of `memory` that is parameters, their gradients and their states.
    """

    op: Op
    lane: str
    start: float
    end: float
    memory: int
    host_memory: int
    recompute: bool = False
    parameter_memory: int = 0


@dataclass(frozen=True)
class Trace:
    """One simulated step; with parameters, a steady one of a training loop.

    makespan: seconds of the step; copies and updates on the host may end later, within the next step.
    peak_bytes, host_peak_bytes: the most that device and host hold.
    events: one for each operation.
    d2h_bytes, h2d_bytes: bytes copied.
    recompute_time, idle_time: seconds in which the compute lane recomputes, and waits.
    """

    makespan: float
    peak_bytes: int
    host_peak_bytes: int
    events: tuple[Event, ...]
    d2h_bytes: int
    h2d_bytes: int
    recompute_time: float
    idle_time: float

    def spans(self, lane: str) -> list[tuple[Event, float, float]]:
        """(event, start, end) of a lane's work, in seconds. Work that continues in the next step is shown at the start
        of this one.
        """
        found: list[tuple[Event, float, float]] = []
        for event in self.events:
            if event.lane != lane:
                continue
            start, end, length = event.start, event.end, self.makespan
            while lane != "compute" and length > 0 and end > length * (1 + _ROUNDING):
                if start < length:
                    found.append((event, start, length))
                start, end = max(0.0, start - length), end - length
            found.append((event, start, end))
        return found

    def __str__(self) -> str:
        """The step in one line; `rotoff.render` draws it."""
        return (
            f"step {self.makespan:.6g} s ({self.recompute_time:.3g} s recomputed, {self.idle_time:.3g} s idle), peak"
            f" {format_bytes(self.peak_bytes)}, host {format_bytes(self.host_peak_bytes)},"
            f" {format_bytes(self.d2h_bytes)} to the host, {format_bytes(self.h2d_bytes)} back"
        )


def figures(trace: Trace) -> dict[str, Any]:
    """The figures of a step for a sequence's meta."""
    return {name: getattr(trace, name) for name in ("makespan", "peak_bytes", "host_peak_bytes")}
