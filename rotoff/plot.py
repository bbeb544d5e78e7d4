"""Pictures of plans and of the cost of limits: matplotlib figures, as PNG, SVG or PDF::

    rotoff.plot.save(rotoff.plot.timeline(chain, sequence), "plan.svg")

Needs matplotlib and no torch. Every function returns a ``matplotlib.figure.Figure`` that belongs to no window and no
global state, so it works in notebooks, threads and on machines without a display.

Colours that can be adjacent differ in lightness (CIE L*) by at least 15, and recomputation and idle time are hatched as
well, so that pictures stay readable in grey and with every kind of colour blindness. The hues are Okabe and Ito's
("Color Universal Design", 2008) or darker and lighter forms of them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ModuleNotFoundError as error:
    if error.name != "matplotlib":
        raise
    raise ModuleNotFoundError(
        "rotoff.plot needs matplotlib, which is not installed: pip install matplotlib", name="matplotlib"
    ) from error
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .core.chain import Chain
from .core.figures import Figures, overhead, percent
from .core.sequence import Op
from .core.sequence import Sequence as Plan
from .core.simulator import Trace
from .core.sizes import BYTES, SECONDS, format_bytes, format_seconds, unit_of
from .errors import OptionError
from .report.expected_step import held, keep_all_step, lanes, shown_step
from .solver import Row

__all__ = ["save", "timeline", "tradeoff"]
INK = "#222222"


@dataclass(frozen=True)
class Look:
    """Fill colour, hatch and the words of a legend."""

    colour: str
    words: str
    hatch: str = ""


LOOKS = {  # by the work of `lanes`, in the order of the legend
    "F": Look("#A6D4F2", "forward"),
    "R": Look("#D55E00", "forward again (recompute)", "////"),
    "B": Look("#0A4D80", "backward"),
    "U": Look("#D98FB6", "update on the device", "...."),
    "idle": Look("#FFFFFF", "idle: compute waits for a copy", "xxxx"),
    "d2h": Look("#E69F00", "device → host"),
    "d2h of parameters": Look("#FBE5B0", "device → host, parameters"),
    "h2d": Look("#00694B", "host → device"),
    "h2d of parameters": Look("#8FD3BC", "host → device, parameters"),
    "H": Look("#CFA5BC", "update on the host"),
}
DARK = (LOOKS["B"], LOOKS["h2d"])  # on which letters are white
HELD, PARAMETERS_HELD = "#DCE9F5", "#BFAFBB"  # bytes on the device: all, and those of parameters, gradients and states

# Colour, marker and dashes of each line in a comparison. Markers distinguish lines whose colours look alike.
SERIES = (
    ("#0A4D80", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#56B4E9", "v", "-"),
    ("#8C6D00", "P", "--"),
    ("#555555", "X", "-."),
    ("#7B3294", "<", ":"),
)

# No box around the data, a faint grid behind it, small letters.
_AXES = {
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True},
    **{"grid.color": "#D9D9D9", "grid.linewidth": 0.6, "xtick.labelsize": 8, "ytick.labelsize": 8},
    "axes.labelsize": 9,
}
_NAMES = {"compute": "compute", "d2h": "device → host", "h2d": "host → device", "host": "host"}
_MANY = 120  # boxes of a kind, with more of which edges would cover them
_LABEL_SHARE = 0.0052  # share of the time axis for each character; a label that does not fit in its box is left out
_LINEAR = 0.2  # overhead up to which its axis is linear, so that one slow mode does not flatten the others
_TICKS = [share * 10.0**power for power in range(-3, 3) for share in (1, 2, 5)]
_LEAST_SPAN = 0.02  # of that axis, so that negligible differences look negligible


class Picture(Figure):  # type: ignore[misc]
    """A figure that notebooks show, although it belongs to no window. Sizes are in inches."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def subplots(self, *args: Any, **kwargs: Any) -> Any:
        with matplotlib.rc_context(_AXES):
            return super().subplots(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        made = io.BytesIO()
        self.savefig(made, format="png", dpi=100)
        return made.getvalue()


def save(figure: Figure, path: str | os.PathLike[str], dpi: int = 150) -> None:
    """Write `figure` to `path` in the format of its suffix: .png (`dpi` dots per inch), .svg or .pdf.

    The same figure gives the same file, byte for byte, with the same matplotlib.

    Raises:
        OptionError: for another suffix. OSError: if the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise OptionError(
            f"the picture {os.fspath(path)!r} ends in {suffix or 'nothing'!r}; end it in .png, .svg or .pdf"
        )
    settings = {"svg.fonttype": "none", "svg.hashsalt": "rotoff", "hatch.linewidth": 0.6}
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[suffix[1:]]
    with matplotlib.rc_context(settings):
        figure.savefig(path, dpi=dpi, metadata=undated)


def _in_units(axes: Axes, which: str, units: tuple[tuple[str, float], ...], what: str) -> None:
    """Label an axis, "x" or "y", in the largest of `units` that it reaches; call it once the axis has its limits. Its
    data are bytes or seconds."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    name, size = unit_of(high, units)
    ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low / size, high / size)
    ticks = [tick for tick in ticks if low <= tick * size <= high]
    axis.set_ticks([tick * size for tick in ticks], [f"{tick:.10g}" for tick in ticks])
    axis.set_label_text(f"{what} ({name})")


# -- a step over time


def timeline(
    chain: Chain,
    sequence: Iterable[Op],
    mem_limit: int | str | None = None,
    measured: Trace | None = None,
) -> Figure:
    """Draw the step of `sequence`: bytes on device and host above its lanes, with recomputed work and idle time marked.

    Args:
        mem_limit: bytes or a size, drawn as a line; by default the limit that the sequence was made for.
        measured: a step that ran, from `Checkpointable.record_step`. Its lanes are below the predicted ones, on the
            same time axis. Its bytes (those that the machine charges, at the measured times) are drawn over the
            predicted ones.

    Raises:
        InvalidSequenceError: if the machine refuses the sequence.
    """
    told = shown_step(chain, sequence, measured, mem_limit)
    plan, trace, measured, figures = told
    steps = [("predicted", trace)] + ([("measured", measured)] if measured is not None else [])
    longest = max(step.makespan for _, step in steps)
    rows = [lane for lane in _NAMES if lane in lanes(trace)]
    height = 2.6 + len(steps) * (0.42 * len(rows) + 0.25) + 0.9
    figure = Picture(10, height)
    ratios = [2.6, *[0.42 * len(rows) + 0.1] * len(steps)]
    axes = figure.subplots(1 + len(steps), 1, sharex=True, gridspec_kw={"height_ratios": ratios})
    figure.suptitle(_title(chain, plan, figures), fontsize=10.5, x=0.01, ha="left")
    _draw_bytes(axes[0], steps, figures.mem_limit)
    shown = set[Look]()
    for axis, (name, step) in zip(axes[1:], steps, strict=True):
        shown |= _draw_lanes(axis, step, rows, longest, name if len(steps) > 1 else "")
    axes[-1].set_xlim(0, longest * 1.002 or 1.0)
    _in_units(axes[-1], "x", SECONDS, "time")
    edge = {"edgecolor": INK, "linewidth": 0.5}
    looks = [look for look in LOOKS.values() if look in shown]
    patches = [Patch(facecolor=look.colour, hatch=look.hatch, label=look.words, **edge) for look in looks]
    columns = len(patches) if len(patches) <= 6 else -(-len(patches) // 2)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def _draw_bytes(axis: Axes, steps: Sequence[tuple[str, Trace]], limit: int | None) -> None:
    several = len(steps) > 1
    most = max([limit or 0, *(max(t.peak_bytes, t.host_peak_bytes) for _, t in steps)])
    for n, (name, trace) in enumerate(steps):
        times, device, host, parameters = zip(*held(trace), strict=True)
        label = f"device, {name}" if several else "device"
        if n == 0:
            axis.fill_between(times, device, step="post", color=HELD, linewidth=0)
        colour, dashes = (LOOKS["B"].colour, "-") if n == 0 else (LOOKS["R"].colour, (0, (4, 1.5)))
        axis.plot(times, device, drawstyle="steps-post", color=colour, linestyle=dashes, linewidth=1.3, label=label)
        if any(parameters) and n == 0:
            words = "of it parameters, gradients, states"
            axis.fill_between(times, parameters, step="post", color=PARAMETERS_HELD, linewidth=0, label=words)
        if trace.host_peak_bytes and n == 0:
            axis.plot(times, host, drawstyle="steps-post", color=INK, linestyle=":", linewidth=1.4, label="host")
    if limit is not None:
        axis.axhline(limit, color=INK, linestyle="--", linewidth=1.2, label=f"limit, {format_bytes(limit)}")
    axis.set_ylim(0, most * 1.06)
    _in_units(axis, "y", BYTES, "held")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False, borderaxespad=0.1)


def _draw_lanes(axis: Axes, trace: Trace, rows: Sequence[str], longest: float, name: str) -> set[Look]:
    """Draw the lanes of a step; returns what is on them."""
    shown, found = set[Look](), lanes(trace)
    for row, lane in enumerate(rows):
        drawn = [span for span in found.get(lane, ()) if span[1] > span[0]]
        digits = max((len(label) for *_, label in drawn), default=0)  # all are labelled alike
        spans: dict[Look, list[tuple[float, float]]] = {}
        for start, end, work, label in drawn:
            look = LOOKS[work]
            spans.setdefault(look, []).append((start, end - start))
            if label and end - start > longest * _LABEL_SHARE * (digits + 1) * (1.6 if look.hatch else 1):
                ink = "#FFFFFF" if look in DARK else INK
                back = {"facecolor": look.colour, "edgecolor": "none", "pad": 0.6} if look.hatch else None
                middle = (start + end) / 2
                axis.text(middle, row, label, ha="center", va="center", fontsize=6.5, color=ink, bbox=back)
        for look, times in spans.items():
            edge = look.colour if len(times) > _MANY and not look.hatch else INK
            bars = {"facecolor": look.colour, "edgecolor": edge, "hatch": look.hatch, "linewidth": 0.35}
            axis.broken_barh(times, (row - 0.38, 0.76), **bars)
        shown |= {*spans}
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.set_yticks(range(len(rows)), [_NAMES[lane] for lane in rows])
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    if name:
        axis.set_title(f"{name}: {format_seconds(trace.makespan)}", fontsize=8.5, loc="left", pad=2)
    return shown


def _title(chain: Chain, plan: Plan, figures: Figures) -> str:
    name = " · ".join(part for part in (chain.name, f"mode {plan.mode}" if plan.mode else "") if part)
    over = f" ({percent(figures.overhead)} over keeping everything)" if figures.keep_all_time else ""
    facts = f"step {format_seconds(figures.step_time)}{over}, peak {figures.peak}"
    return f"{name}\n{facts}" if name else facts  # one line would leave the picture


# -- step time against bytes


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
    if len(names) > len(SERIES):
        raise OptionError(f"there are {len(names)} modes; give at most {len(SERIES)} for one picture")
    everything = keep_all_step(chain)
    figure = Picture(7.2, 5.0)
    axis = figure.subplots()
    axis.set_title(chain.name or "step time against limit", fontsize=10.5, loc="left")
    _draw_bound(axis, made, everything.makespan)
    for name, series in zip(names, SERIES, strict=False):
        _draw_mode(axis, name, [row for row in made if row.mode == name], series)
    star: dict[str, Any] = {"marker": "*", "color": INK, "markersize": 11, "linestyle": "none"}
    axis.plot([everything.peak_bytes], [0.0], label="keeping everything", **star)
    _in_units(axis, "x", BYTES, "limit, with the batch")
    top = max(*(row.overhead or 0.0 for row in made), _LEAST_SPAN)
    axis.set_yscale("asinh", linear_width=_LINEAR)
    ticks = [0.0, *(share for share in _TICKS if top / 50 <= share <= 1.06 * top)]
    axis.set_yticks(ticks, map(percent, ticks))
    axis.set_yticks([], minor=True)
    axis.set_ylim(-0.18 * min(top, _LINEAR), 1.06 * top)
    axis.set_ylabel(f"step time over keeping everything ({format_seconds(everything.makespan)})")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_bound(axis: Axes, rows: list[Row], base: float) -> None:
    """Draw the certified lower bound at the limits of `rows`; each one holds for smaller limits, too. base: seconds of
    keeping everything."""
    bounds = sorted({(row.limit, overhead(row.bound, base)) for row in rows if row.bound is not None})
    points = list(zip(*bounds, strict=True))
    axis.fill_between(*points, -1, step="pre", color="#EFEFEF", linewidth=0)
    look: dict[str, Any] = {"color": INK, "linestyle": (0, (1, 1)), "linewidth": 1.3, "drawstyle": "steps-pre"}
    axis.plot(*points, label="certified bound: nothing is faster", **look)


def _draw_mode(axis: Axes, name: str, rows: list[Row], series: tuple[str, str, str]) -> None:
    """Draw the fastest of the mode's `rows` at each limit."""
    colour, marker, dashes = series
    line = dict(sorted(((row.limit, row.overhead) for row in rows), reverse=True))  # the fastest comes last
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 1.5}
    axis.plot(*zip(*sorted(line.items()), strict=True), dashes, label=name, **look)
