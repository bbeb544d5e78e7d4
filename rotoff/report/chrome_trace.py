"""A step as a trace file for Perfetto (https://ui.perfetto.dev) and chrome://tracing, in the Trace Event Format's JSON.

It has a process for the predicted step and one for the measured step, if there is one; a thread for each lane; and
counters for the bytes on the device and on the host. Times are in microseconds from the step's start, as the format
requires. With parameters, the host's updates have a thread too, and work that continues in the next step is shown where
it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ..core.chain import Chain
from ..core.sequence import COMPUTES, FORWARDS, UPDATES, Op
from ..core.simulator import Event, Trace
from ..io.files import write_whole
from .expected_step import held, shown_step

_LANES = {"compute": "compute", "d2h": "device to host", "h2d": "host to device", "host": "updates on the host"}
_MICRO = 1e6


def chrome_trace(chain: Chain, sequence: Iterable[Op], measured: Trace | None = None) -> dict[str, Any]:
    """The step of `sequence` as an object of the Trace Event Format; `save_chrome_trace` writes it to a file.

    Args:
        chain, sequence: a plan and the chain that it was made for.
        measured: a step that ran, from `Checkpointable.record_step`; shown as a second process.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    _, predicted, measured, figures = shown_step(chain, sequence, measured)
    events = _process(1, "rotoff, predicted", chain, predicted)
    if measured is not None:
        events += _process(2, "rotoff, measured", chain, measured)
    said = {**asdict(figures), "overhead": figures.overhead}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"chain": chain.name, **said}}


def save_chrome_trace(
    path: str | os.PathLike[str], chain: Chain, sequence: Iterable[Op], measured: Trace | None = None
) -> None:
    """Write the `chrome_trace` of a step to `path`, for https://ui.perfetto.dev.

    Args:
        chain, sequence, measured: as for `chrome_trace`.
    """
    write_whole(path, json.dumps(chrome_trace(chain, sequence, measured)))


def _process(pid: int, name: str, chain: Chain, trace: Trace) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    for tid, (lane, words) in enumerate(_LANES.items(), start=1):
        if lane == "host" and not chain.parameters:
            continue
        made.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": words}})
        made.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    made += [_counter(pid, point, bool(chain.parameters)) for point in held(trace)]
    made += [_slice(pid, n, chain, event) for n, event in enumerate(trace.events) if event.end > event.start]
    return made


def _slice(pid: int, index: int, chain: Chain, event: Event) -> dict[str, Any]:
    op = event.op
    kind = "wait" if event.lane == "compute" and op.kind not in COMPUTES else op.kind.value
    if op.of or op.kind in UPDATES:
        where = {"parameters": chain.group(op.stage).name}
    else:
        where = {"stage": chain.stage(op.stage).name if op.stage else "input"}
    details = {"op": index, **where, "device_bytes": event.memory, "host_bytes": event.host_memory}
    if op.kind in FORWARDS:
        details["again"] = event.recompute
    return {
        "ph": "X",
        "pid": pid,
        "tid": [*_LANES].index(event.lane) + 1,
        "ts": event.start * _MICRO,
        "dur": (event.end - event.start) * _MICRO,
        "name": str(op),
        "cat": "recompute" if event.recompute else f"{kind} parameters" if op.of else kind,
        "args": details,
    }


def _counter(pid: int, point: tuple[float, int, int, int], parameters: bool) -> dict[str, Any]:
    seconds, device, host, of_parameters = point
    shown = {"device": device, "host": host}
    if parameters:  # the parts of a counter are stacked
        shown = {"device, parameters": of_parameters, "device, all else": device - of_parameters, "host": host}
    return {"ph": "C", "pid": pid, "ts": seconds * _MICRO, "name": "bytes", "args": shown}
