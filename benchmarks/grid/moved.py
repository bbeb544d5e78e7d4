"""What became of a step's copies: how near the link's speed they ran, and how much of them compute hid.

From recorded steps (`Checkpointable.record_step`) beside the machine's prediction of them, each right after the link
was measured again: what a link does varies from minute to minute by more than what is asked here. A copy is hidden for
as long as compute does not wait for it; what compute waited is the sum of its lane's events that compute nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import rotoff
from rotoff.core.sequence import COMPUTES
from rotoff.core.simulator import Trace

from ..prediction import link_now


@dataclass(frozen=True)
class Moved:
    """d2h_bytes, h2d_bytes: of one step. d2h_share, h2d_share: speed of the copies over the bandwidth measured beside
    them, all bytes of a direction over all seconds that its copies took; None where nothing goes that way.
    d2h_plan_share, h2d_plan_share: the same over the bandwidth that the plan counts on, which may be of another day.
    hidden, planned_hidden: of the seconds that copies take, the share that compute does not wait for, measured and
    predicted."""

    d2h_bytes: int
    h2d_bytes: int
    d2h_share: float | None
    h2d_share: float | None
    d2h_plan_share: float | None
    h2d_plan_share: float | None
    hidden: float
    planned_hidden: float


def moved(model: rotoff.Checkpointable, step: Callable[[], object], repeats: int = 5) -> Moved | None:
    """Medians over `repeats` recorded steps; None where the plan moves nothing."""
    predicted = rotoff.simulate(model.chain, model.sequence)
    if not predicted.d2h_bytes:
        return None
    traces, links = [], []
    for _ in range(repeats):
        links.append(link_now(model))
        with model.record_step() as recorded:
            step()
        traces.append(recorded.trace)
    planned = [model.chain] * repeats
    return Moved(
        predicted.d2h_bytes,
        predicted.h2d_bytes,
        *(_share(traces, lane, chains) for chains in (links, planned) for lane in ("d2h", "h2d")),
        statistics.median(hidden_share(trace) for trace in traces),
        hidden_share(predicted),
    )


def hidden_share(trace: Trace) -> float:
    """Of the seconds of all copies, the share that compute does not wait for."""
    copies = _seconds(trace, "d2h") + _seconds(trace, "h2d")
    waited = sum(e.end - e.start for e in trace.events if e.lane == "compute" and e.op.kind not in COMPUTES)
    return max(0.0, 1.0 - waited / copies) if copies else 1.0


def _share(traces: Sequence[Trace], lane: str, chains: Sequence[rotoff.Chain]) -> float | None:
    """The median over the steps of their speed over the bandwidth of the chain beside each."""
    nbytes = getattr(traces[0], f"{lane}_bytes")
    if not nbytes:
        return None
    pairs = zip(traces, chains, strict=True)
    return statistics.median(nbytes / max(_seconds(t, lane), 1e-9) / getattr(c, f"{lane}_bandwidth") for t, c in pairs)


def _seconds(trace: Trace, lane: str) -> float:
    return sum(event.end - event.start for event in trace.events if event.lane == lane)
