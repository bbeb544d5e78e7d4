"""A plan, or a measured step, over time: lanes of work under the curve of bytes.

With parameters, their bytes are drawn below all others, the host's updates have a lane, and work that continues in the
next step is drawn at the start of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..core.chain import Chain
from ..core.figures import Figures, percent
from ..core.sequence import Op
from ..core.sequence import Sequence as Plan
from ..core.simulator import Trace
from ..core.sizes import SECONDS, format_bytes, format_seconds
from ..report.expected_step import held, lanes, shown_step
from . import style
from .style import Look

_NAMES = {"compute": "compute", "d2h": "device → host", "h2d": "host → device", "host": "host"}
_MANY = 120  # boxes of a kind, with more of which edges would cover them
_LABEL_SHARE = 0.0052  # share of the time axis for each character; a label that does not fit in its box is left out


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
    figure = style.Picture(10, height)
    ratios = [2.6, *[0.42 * len(rows) + 0.1] * len(steps)]
    axes = figure.subplots(1 + len(steps), 1, sharex=True, gridspec_kw={"height_ratios": ratios})
    figure.suptitle(_title(chain, plan, figures), fontsize=10.5, x=0.01, ha="left")
    _draw_bytes(axes[0], steps, figures.mem_limit)
    shown = set[Look]()
    for axis, (name, step) in zip(axes[1:], steps, strict=True):
        shown |= _draw_lanes(axis, step, rows, longest, name if len(steps) > 1 else "")
    axes[-1].set_xlim(0, longest * 1.002 or 1.0)
    style.in_units(axes[-1], "x", SECONDS, "time")
    edge = {"edgecolor": style.INK, "linewidth": 0.5}
    looks = [look for look in style.LOOKS.values() if look in shown]
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
            axis.fill_between(times, device, step="post", color=style.HELD, linewidth=0)
        colour, dashes = (style.LOOKS["B"].colour, "-") if n == 0 else (style.LOOKS["R"].colour, (0, (4, 1.5)))
        axis.plot(times, device, drawstyle="steps-post", color=colour, linestyle=dashes, linewidth=1.3, label=label)
        if any(parameters) and n == 0:
            words = "of it parameters, gradients, states"
            axis.fill_between(times, parameters, step="post", color=style.PARAMETERS_HELD, linewidth=0, label=words)
        if trace.host_peak_bytes and n == 0:
            axis.plot(times, host, drawstyle="steps-post", color=style.INK, linestyle=":", linewidth=1.4, label="host")
    if limit is not None:
        axis.axhline(limit, color=style.INK, linestyle="--", linewidth=1.2, label=f"limit, {format_bytes(limit)}")
    axis.set_ylim(0, most * 1.06)
    style.in_units(axis, "y", style.BYTES, "held")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False, borderaxespad=0.1)


def _draw_lanes(axis: Axes, trace: Trace, rows: Sequence[str], longest: float, name: str) -> set[Look]:
    """Draw the lanes of a step; returns what is on them."""
    shown, found = set[Look](), lanes(trace)
    for row, lane in enumerate(rows):
        drawn = [span for span in found.get(lane, ()) if span[1] > span[0]]
        digits = max((len(label) for *_, label in drawn), default=0)  # all are labelled alike
        spans: dict[Look, list[tuple[float, float]]] = {}
        for start, end, work, label in drawn:
            look = style.LOOKS[work]
            spans.setdefault(look, []).append((start, end - start))
            if label and end - start > longest * _LABEL_SHARE * (digits + 1) * (1.6 if look.hatch else 1):
                ink = "#FFFFFF" if look in style.DARK else style.INK
                back = {"facecolor": look.colour, "edgecolor": "none", "pad": 0.6} if look.hatch else None
                middle = (start + end) / 2
                axis.text(middle, row, label, ha="center", va="center", fontsize=6.5, color=ink, bbox=back)
        for look, times in spans.items():
            edge = look.colour if len(times) > _MANY and not look.hatch else style.INK
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
