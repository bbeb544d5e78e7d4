"""A profile: bytes and seconds of each stage."""

from __future__ import annotations

from matplotlib.figure import Figure

from ..core.chain import Chain
from ..core.sizes import format_bytes
from . import style

_NAMED = 60  # most stages with names on the axis; more would be illegible
SAVED, OUTPUT, TRANSIENT = "#A6D4F2", "#0A4D80", "#FFFFFF"


def stages(chain: Chain, title: str = "") -> Figure:
    """Draw bytes and times of every stage of `chain`, stage 1 at the left.

    Bytes: those saved for the backward, the output's part of them, and on top the transient bytes of its operations
    (the larger of forward's and backward's). Times: forward, and backward on top.
    """
    L = len(chain)
    places = list(range(1, L + 1))
    figure = style.new_figure(max(6.5, min(14.0, 2.0 + 0.16 * L)), 5.4)
    top, bottom = figure.subplots(2, 1, sharex=True)
    saved_all = sum(stage.saved_bytes for stage in chain.stages)
    default = f"{chain.name or 'chain'} · {L} stages, {format_bytes(saved_all)} saved"
    figure.suptitle(title or default, fontsize=10.5, x=0.01, ha="left")

    saved = [stage.saved_bytes for stage in chain.stages]
    output = [min(stage.output_bytes, stage.saved_bytes) for stage in chain.stages]
    transient = [max(stage.forward_transient_bytes, stage.backward_transient_bytes) for stage in chain.stages]
    edge = {"edgecolor": style.INK, "linewidth": 0.4, "width": 0.85}
    top.bar(places, saved, color=SAVED, label="saved for backward", **edge)
    top.bar(places, output, color=OUTPUT, label="of which output", **edge)
    if any(transient):
        top.bar(
            places, transient, bottom=saved, color=TRANSIENT, hatch="////", label="transient, while it runs", **edge
        )
    most = max(s + t for s, t in zip(saved, transient, strict=True))
    unit, size = style.byte_unit(most)
    style.quiet(top)
    style.in_units(top, "y", size, unit, "bytes")

    forward = [stage.forward_time for stage in chain.stages]
    backward = [stage.backward_time for stage in chain.stages]
    bottom.bar(places, forward, color=style.FORWARD.colour, label="forward", **edge)
    bottom.bar(places, backward, bottom=forward, color=style.BACKWARD.colour, label="backward", **edge)
    longest = max(f + b for f, b in zip(forward, backward, strict=True))
    unit, seconds = style.time_unit(longest)
    style.quiet(bottom)
    style.in_units(bottom, "y", seconds, unit, "time")

    for axis in (top, bottom):
        axis.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.1)
        axis.set_xlim(0.3, L + 0.7)
    if L <= _NAMED and any(stage.name for stage in chain.stages):
        names = [f"{i} {_short(chain.stage(i).name)}" for i in places]
        bottom.set_xticks(places, names, rotation=90, fontsize=7 if L <= 30 else 6)
    else:
        bottom.set_xlabel("stage", fontsize=9)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"
