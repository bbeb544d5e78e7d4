"""A plan as text on one screen, whatever the number of stages: the curve of bytes, lanes, and the words of the log.

With parameters, the curve's lower part (▒) is theirs, and the host's updates have a lane.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import pairwise
from textwrap import wrap

from ..core.chain import Chain
from ..core.figures import percent
from ..core.sequence import Op
from ..core.simulator import Trace
from ..core.sizes import BYTES, format_bytes, format_seconds, unit_of
from .expected_step import ShownStep, held, lanes, shown_step
from .summary import in_words

_HEIGHT = 7  # rows of the curve
_LEFT = 9  # characters before a row
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PARAMETERS = "▒"
_COPIES = {"d2h": ">", "h2d": "<", "d2h of parameters": "»", "h2d of parameters": "«", "idle": "."}
_LANES = {"compute": "compute", "d2h": "to host", "h2d": "to dev.", "host": "on host"}


def render(
    chain: Chain,
    sequence: Iterable[Op],
    mem_limit: int | str | None = None,
    *,
    width: int | None = None,
) -> str:
    """Draw the plan as text of about 20 lines.

    Args:
        chain, sequence: a plan and the chain that it was made for.
        mem_limit: bytes or a size; by default the limit that the sequence was made for.
        width: characters in a line, at least 40; by default the terminal's, at most 120.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    step = shown_step(chain, sequence, None, mem_limit)
    shown, limit = step.trace, step.figures.mem_limit
    columns = max(40, min(120, shutil.get_terminal_size().columns) if width is None else width)
    room = columns - _LEFT - 1

    lines = [*_wrap(_headline(chain, step), columns), "", *_curve(shown, limit, room)]
    for lane, spans in lanes(shown).items():
        drawn = _lane(spans, room / shown.makespan if shown.makespan else 0.0, room, lane == "compute")
        lines.append(f"{_LANES[lane]:>{_LEFT - 1}} {drawn}")
    lines.append(f"{'':>{_LEFT}}{_axis(shown.makespan, room)}")
    legend = "F forward  R forward again  B backward  . idle  > to host  < to device"
    if chain.parameters:
        legend += f"  U update  H update on the host  » « {_PARAMETERS} parameters, gradients, optimizer states"
    lines += [f"{'':>{_LEFT}}{part}" for part in _wrap(legend, room)]
    lines += ["", *_wrap(in_words(step.plan), columns)]
    return "\n".join(line.rstrip() for line in lines)


def _headline(chain: Chain, step: ShownStep) -> str:
    figures = step.figures
    parts = [chain.name or "chain", f"{len(chain)} stages"]
    if step.plan.mode:
        parts.append(f"mode {step.plan.mode}")
    over = f" ({percent(figures.overhead)})" if figures.keep_all_time else ""
    parts.append(f"step {format_seconds(figures.step_time)}{over}")
    parts.append(f"peak {figures.peak}")
    if figures.host_bytes:
        parts.append(f"host {format_bytes(figures.host_bytes)}")
    return " · ".join(parts)


def _curve(trace: Trace, limit: int | None, room: int) -> list[str]:
    """The most bytes on the device in each column's time, in `_HEIGHT` rows; the top is the limit, if there is one."""
    top = max(limit or 0, trace.peak_bytes) or 1
    peaks, parameters = [0] * room, [0] * room
    scale = room / trace.makespan if trace.makespan else 0.0
    points = list(held(trace))
    for (start, device, _, theirs_now), (end, *_) in pairwise([*points, points[-1]]):
        first = min(room - 1, int(start * scale))
        for column in range(first, min(room - 1, max(first, int(end * scale - 1e-9))) + 1):
            if device > peaks[column]:
                peaks[column], parameters[column] = device, theirs_now
    eighths = [-(-peak * _HEIGHT * 8 // top) for peak in peaks]
    theirs = [round(part * _HEIGHT / top) for part in parameters]
    unit, size = unit_of(top, BYTES)
    marks = {_HEIGHT: f"{top / size:.3g} {unit}", (_HEIGHT + 1) // 2: f"{top / size / 2:.3g} {unit}", 1: f"0 {unit}"}
    rows = []
    for row in range(_HEIGHT, 0, -1):
        cells = "".join(
            _PARAMETERS if row <= lower else _BLOCKS[max(0, min(8, height - 8 * (row - 1)))]
            for height, lower in zip(eighths, theirs, strict=True)
        )
        rows.append(f"{marks.get(row, ''):>{_LEFT - 1}} {cells}")
    if limit is not None:
        label = f"limit {format_bytes(limit)} "
        rows.insert(0, f"{'':>{_LEFT}}{label:┄<{room}}")
    return rows


def _lane(spans: Iterable[tuple[float, float, str, str]], scale: float, room: int, compute: bool) -> str:
    """One character for each column: the kind of work that fills most of its time. scale: columns for each second."""
    share: list[dict[str, float]] = [{} for _ in range(room)]
    for begun, ended, work, _ in spans:
        start, end, letter = begun * scale, ended * scale, _COPIES.get(work, work)
        for column in range(int(start), min(room, int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            share[column][letter] = share[column].get(letter, 0.0) + max(0.0, part)
        if not compute:  # show copies that are much shorter than a column, too
            share[min(room - 1, int(start))][letter] = 1.0
    empty = "." if compute else " "
    cells = []
    for found in share:
        found[empty] = found.get(empty, 0.0) + 1 - sum(found.values())
        cells.append(max(found, key=lambda letter: found[letter]))
    return "".join(cells)


def _axis(makespan: float, room: int) -> str:
    end = format_seconds(makespan)
    middle = format_seconds(makespan / 2)
    text = "0".ljust(room // 2 - len(middle) // 2) + middle
    return text + end.rjust(max(len(end) + 1, room - len(text)))


def _wrap(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)
