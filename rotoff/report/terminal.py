"""A plan as text on one screen, whatever the number of stages: lanes, the curve of bytes, and a letter for each stage.

With parameters, the curve's lower part (▒) is theirs, the host's updates have a lane, and every group has a letter too.

Colour is used if the output is a terminal that supports it. ``NO_COLOR`` switches it off (https://no-color.org),
``FORCE_COLOR`` switches it on. Without colour, the characters alone show the same.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from itertools import pairwise
from textwrap import wrap
from typing import TextIO

from ..core.chain import Chain
from ..core.figures import percent
from ..core.sequence import COMPUTES, Op, OpKind
from ..core.simulator import Event, Trace
from ..core.sizes import format_bytes, format_seconds, parse_bytes
from .expected_step import ShownStep, held, shown_step
from .summary import FATES, GROUP_FATES, fates, group_fates, ranges

_HEIGHT = 7  # rows of the curve
_LEFT = 9  # characters before a row
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PARAMETERS = "▒"
_COLOURS = {
    "36": "Fks",
    "33": f"Rr{_PARAMETERS}",
    "34": f"B{_BLOCKS[1:]}",
    "90": ".",
    "35": ">m",
    "32": "<pob",
    "31": "UHxhz",
}
_STYLES = {letter: code for code, letters in _COLOURS.items() for letter in letters}  # of ANSI
_STYLES |= {"»": "95", "«": "92", "faint": "90", "bold": "1"}


def has_colour(stream: TextIO) -> bool:
    """Whether text for `stream` may be coloured."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def render(
    chain: Chain,
    sequence: Iterable[Op],
    mem_limit: int | str | None = None,
    *,
    width: int | None = None,
    colour: bool | None = None,
    measured: Trace | None = None,
) -> str:
    """Draw the plan as text of about 20 lines.

    Args:
        chain, sequence: a plan and the chain that it was made for.
        mem_limit: bytes or a size; by default the limit that the sequence was made for.
        width: characters in a line, at least 40; by default the terminal's, at most 120.
        colour: whether to use ANSI colours; by default if standard output supports them.
        measured: a step that ran; its times are shown, not the predicted ones.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    step = shown_step(chain, sequence, measured, mem_limit)
    shown, limit = step.measured or step.trace, step.figures.mem_limit
    paint = _Paint(has_colour(sys.stdout) if colour is None else colour)
    columns = max(40, min(120, shutil.get_terminal_size().columns) if width is None else width)
    room = columns - _LEFT - 1

    lines = [paint("bold", part) for part in _wrap(_headline(chain, step), columns)]
    lines += ["", *_curve(shown, limit, room, paint)]
    for name, lane in (("compute", "compute"), ("to host", "d2h"), ("to dev.", "h2d"), ("on host", "host")):
        if lane == "compute" or any(event.lane == lane for event in shown.events):
            lines.append(f"{name:>{_LEFT - 1}} {paint.each(_lane(shown, lane, room))}".rstrip())
    lines.append(f"{'':>{_LEFT}}{_axis(shown.makespan, room)}")
    legend = "F forward  R forward again  B backward  . idle  > to host  < to device"
    if chain.parameters:
        legend += f"  U update  H update on the host  » « {_PARAMETERS} parameters, gradients, optimizer states"
    lines += [paint("faint", f"{'':>{_LEFT}}{part}") for part in _wrap(legend, room)]
    lines += ["", *_letters("stages", fates(step.plan), FATES, columns, paint)]
    if chain.parameters:
        lines += _letters("params", group_fates(step.plan), GROUP_FATES, columns, paint)
    return "\n".join(line.rstrip() for line in lines)


class _Paint:
    """Puts ANSI colours around text, or leaves it as it is."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._on and text.strip() else text

    def each(self, text: str) -> str:
        """Paint every run of equal characters in its own colour."""
        made, start = [], 0
        for n in range(1, len(text) + 1):
            if n == len(text) or text[n] != text[start]:
                part = text[start:n]
                made.append(self(part[0], part) if part[0] in _STYLES else part)
                start = n
        return "".join(made)


def _headline(chain: Chain, step: ShownStep) -> str:
    plan, trace, measured, figures = step
    shown = measured or trace
    parts = [chain.name or "chain", f"{len(chain)} stages"]
    if plan.mode:
        parts.append(f"mode {plan.mode}")
    over = f" ({percent(step.overhead)})" if figures.keep_all_time else ""
    was = f", predicted {format_seconds(trace.makespan)}" if measured else ""
    parts.append(f"{'measured ' if measured else ''}step {format_seconds(shown.makespan)}{over}{was}")
    parts.append(f"peak {figures.peak}")
    if figures.host_bytes:
        parts.append(f"host {format_bytes(figures.host_bytes)}")
    return " · ".join(parts)


def _curve(trace: Trace, limit: int | None, room: int, paint: _Paint) -> list[str]:
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
    unit = format_bytes(top).split()[1]
    size = parse_bytes(f"1 {unit}")
    marks = {_HEIGHT: f"{top / size:.3g} {unit}", (_HEIGHT + 1) // 2: f"{top / size / 2:.3g} {unit}", 1: f"0 {unit}"}
    rows = []
    for row in range(_HEIGHT, 0, -1):
        cells = "".join(
            _PARAMETERS if row <= lower else _BLOCKS[max(0, min(8, height - 8 * (row - 1)))]
            for height, lower in zip(eighths, theirs, strict=True)
        )
        mark = marks.get(row, "")
        rows.append(f"{mark:>{_LEFT - 1}} {paint.each(cells)}")
    if limit is not None:
        label = f"limit {format_bytes(limit)} "
        rows.insert(0, f"{'':>{_LEFT}}{paint('faint', label + '┄' * max(0, room - len(label)))}")
    return rows


def _lane(trace: Trace, lane: str, room: int) -> str:
    """One character for each column: the kind of work that fills most of its time."""
    share: list[dict[str, float]] = [{} for _ in range(room)]
    scale = room / trace.makespan if trace.makespan else 0.0
    for event, begun, ended in trace.spans(lane):
        if lane == "compute" and event.op.kind not in COMPUTES:
            continue
        start, end = begun * scale, ended * scale
        letter = _letter(event)
        for column in range(int(start), min(room, int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            share[column][letter] = share[column].get(letter, 0.0) + max(0.0, part)
        if lane != "compute":  # show copies that are much shorter than a column, too
            share[min(room - 1, int(start))][letter] = 1.0
    empty = "." if lane == "compute" else " "
    cells = []
    for found in share:
        found[empty] = 1 - sum(found.values())
        cells.append(max(found, key=lambda letter: found[letter]))
    return "".join(cells)


def _letter(event: Event) -> str:
    if event.lane in ("d2h", "h2d"):
        return {"d2h": ">»", "h2d": "<«"}[event.lane][bool(event.op.of)]
    if event.op.kind in (OpKind.B, OpKind.U, OpKind.H):
        return event.op.kind.value
    return "R" if event.recompute else "F"


def _axis(makespan: float, room: int) -> str:
    end = format_seconds(makespan)
    middle = format_seconds(makespan / 2)
    text = "0".ljust(room // 2 - len(middle) // 2) + middle
    return text + end.rjust(max(len(end) + 1, room - len(text)))


def _letters(
    name: str, found: dict[int, str], letters: dict[str, tuple[str, str]], columns: int, paint: _Paint
) -> list[str]:
    """Rows with a letter for each number in `found`, and a legend in words."""
    row, room, rows = "".join(letters[fate][0] for fate in found.values()), columns - _LEFT - 1, []
    for start in range(0, len(row), room):
        mark = f"{start + 1}-{min(len(row), start + room)}"
        rows.append(f"{name if not start else '':>{_LEFT - 1}} {paint.each(row[start : start + room])}")
        rows[-1] += f"  {paint('faint', mark)}" if len(row) <= room - len(mark) - 2 else ""
    for fate, (letter, words) in letters.items():
        if numbers := [number for number, word in found.items() if word == fate]:
            text = _wrap(f"{letter} {words}: {ranges(numbers)}", columns - _LEFT)
            rows += [f"{'':>{_LEFT}}{part}" for part in (text if len(text) <= 2 else [text[0], f"{text[1][:-2]} …"])]
    return rows


def _wrap(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)
