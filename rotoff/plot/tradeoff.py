"""Step time against bytes: the cost of every limit in every mode, and the bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..core.chain import Chain
from ..core.figures import overhead, percent
from ..core.sizes import format_seconds
from ..errors import OptionError
from ..report.expected_step import keep_all_step
from ..solver import Row
from . import style

_CUT = 4.0  # the overhead's axis is cut at this multiple of the best mode's largest one,
_LEAST_CUT = 0.2  # but not below this;
_LEAST_SPAN = 0.02  # it spans at least this, so that negligible differences look negligible


def tradeoff(chain: Chain, rows: Iterable[Row]) -> Figure:
    """Draw the cost of limits: a line for each mode in `rows`, and the certified lower bound.

    Args:
        rows: a `Sweep` of this chain, or rows of several.

    Raises:
        OptionError: if no row has a plan that fits.
    """
    made = [row for row in rows if row.makespan is not None]
    if not made:
        raise OptionError("nothing in these rows fits its limit; give larger limits")
    names = list(dict.fromkeys(row.mode for row in made))
    if len(names) > len(style.SERIES):
        raise OptionError(f"there are {len(names)} modes; give at most {len(style.SERIES)} for one picture")
    everything = keep_all_step(chain)
    figure = style.Picture(7.2, 5.0)
    axis = figure.subplots()
    axis.set_title(chain.name or "step time against limit", fontsize=10.5, loc="left")
    _draw_bound(axis, made, everything.makespan)
    for name, series in zip(names, style.SERIES, strict=False):
        _draw_mode(axis, name, [row for row in made if row.mode == name], series)
    star: dict[str, Any] = {"marker": "*", "color": style.INK, "markersize": 11, "linestyle": "none"}
    axis.plot([everything.peak_bytes], [0.0], label="keeping everything", **star)
    style.in_units(axis, "x", style.BYTES, "limit, with the batch")
    _cut(axis, made)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: percent(share)))
    axis.set_ylabel(f"step time over keeping everything ({format_seconds(everything.makespan)})")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_bound(axis: Axes, rows: list[Row], base: float) -> None:
    """Draw the certified lower bound at the limits of `rows`; each one holds for smaller limits, too. base: seconds of
    keeping everything."""
    bounds = sorted({(row.limit, overhead(row.bound, base)) for row in rows if row.bound is not None})
    points = list(zip(*bounds, strict=True))
    axis.fill_between(*points, -1, step="pre", color="#EFEFEF", linewidth=0)
    look: dict[str, Any] = {"color": style.INK, "linestyle": (0, (1, 1)), "linewidth": 1.3, "drawstyle": "steps-pre"}
    axis.plot(*points, label="certified bound: nothing is faster", **look)


def _draw_mode(axis: Axes, name: str, rows: list[Row], series: tuple[str, str, str]) -> None:
    """Draw the fastest of the mode's `rows` at each limit."""
    colour, marker, dashes = series
    line = dict(sorted(((row.limit, row.overhead) for row in rows), reverse=True))  # the fastest comes last
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.5}
    axis.plot(*zip(*sorted(line.items()), strict=True), dashes, label=name, **look)


def _cut(axis: Axes, made: list[Row]) -> None:
    """Cut the axis of overheads if one slow mode would flatten the others."""
    found = [(row.limit, row.overhead or 0.0) for row in made]
    slowest, best = max(over for _, over in found), dict(sorted(found, reverse=True))  # of the fastest mode
    top = max(_CUT * max(best.values()), _LEAST_CUT)
    if slowest > top:
        axis.set_title(f"lines that leave the top: up to {percent(slowest)}", loc="right", fontsize=8)
    top = max(min(slowest, top), _LEAST_SPAN)
    axis.set_ylim(-0.18 * top, 1.06 * top)
