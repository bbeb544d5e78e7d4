"""Step time against bytes: the cost of every limit in every mode, the bound, and the smallest limits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..core.chain import Chain
from ..core.simulator import simulate
from ..errors import OptionError
from ..solver import Row, keep_all
from ..solver.bounds import MODES, lower_bound, min_mem_limit
from . import style

_BOUND_POINTS = 24
_CUT = 4.0  # the axis ends at so many times what the best mode costs at most,
_LEAST_CUT = 0.2  # but never lower than this share above keeping everything,
_LEAST_SPAN = 0.02  # and shows at least this share, so that a difference of nothing looks like nothing


def tradeoff(chain: Chain, rows: Iterable[Row], title: str = "") -> Figure:
    """Draw the cost of limits: a line for each mode in `rows`, the certified lower bound, and the smallest limit of
    each mode.

    Args:
        rows: a `Sweep` of this chain, or rows of several.
        title: by default the chain's name.

    Raises:
        OptionError: if no row has a plan that fits.
    """
    made = [row for row in rows if row.makespan is not None]
    if not made:
        raise OptionError("nothing in these rows fits its limit; give larger limits")
    names = list(dict.fromkeys(row.mode for row in made))
    if len(names) > len(style.SERIES):
        raise OptionError(f"{len(names)} modes in one picture; at most {len(style.SERIES)} can be told apart")
    everything = simulate(chain, keep_all(chain))
    peak, base = everything.peak_bytes, everything.makespan if chain.parameters else chain.compute_time
    figure = style.new_figure(7.2, 5.0)
    axis = figure.subplots()
    axis.set_title(title or chain.name or "step time against limit", fontsize=10.5, loc="left")

    limits = [row.limit for row in made]
    least, most = min(limits), max([*limits, peak])
    points = [least + (most - least) * n / (_BOUND_POINTS - 1) for n in range(_BOUND_POINTS)]
    bounds = [lower_bound(chain, int(point)) for point in points]
    axis.fill_between(points, bounds, 0, color="#EFEFEF", linewidth=0)
    axis.plot(
        points,
        bounds,
        color=style.INK,
        linestyle=(0, (1, 1)),
        linewidth=1.3,
        label="certified bound: nothing is faster",
    )
    for name, (colour, marker, dashes) in zip(names, style.SERIES, strict=False):
        found = sorted((row.limit, row.makespan) for row in made if row.mode == name)
        line = dict(next(group) for _, group in groupby(found, key=lambda pair: pair[0]))  # the fastest of a limit
        axis.plot(
            list(line),
            list(line.values()),
            dashes,
            color=colour,
            marker=marker,
            markersize=4.5,
            linewidth=1.5,
            label=name,
        )
        if name in MODES:
            hollow = {"marker": marker, "color": colour, "markersize": 6.5, "markerfacecolor": "none"}
            axis.plot(  # a tick on the axis, since a smallest limit has no step time of its own
                [min_mem_limit(chain, name)],
                [0],
                linestyle="none",
                transform=axis.get_xaxis_transform(),
                clip_on=False,
                label=f"smallest limit of {name}",
                **hollow,
            )
    axis.plot([peak], [base], marker="*", color=style.INK, markersize=11, linestyle="none", label="keeping everything")

    unit, size = style.byte_unit(most)
    style.quiet(axis, "both")
    style.in_units(axis, "x", size, unit, "limit")
    slowest = max(row.makespan or 0.0 for row in made)
    hardest = max(
        min(r.makespan or 0.0 for r in made if r.limit == limit) for limit in limits
    )  # the best mode's slowest step
    cut = base + max(_CUT * (hardest - base), _LEAST_CUT * base)
    if slowest > cut > base:  # one bad mode must not press the others flat
        axis.set_title(f"lines that leave the top: up to {slowest:.3g} s", loc="right", fontsize=8)
        slowest = cut
    slowest = max(slowest, base * (1 + _LEAST_SPAN))
    room = slowest - base or base
    axis.set_ylim(base - 0.18 * room, slowest + 0.06 * room)
    length, seconds = style.time_unit(slowest)
    style.in_units(axis, "y", seconds, length, "step time")
    if base:
        right = axis.secondary_yaxis("right", functions=(lambda t: t / base - 1, lambda share: (share + 1) * base))
        right.yaxis.set_major_formatter(
            FuncFormatter(lambda share, _: f"{100 * share:+.3g} %" if abs(share) > 1e-9 else "0 %")
        )
        right.set_ylabel("over keeping everything", fontsize=9)
        right.tick_params(labelsize=8)
        right.spines["right"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
