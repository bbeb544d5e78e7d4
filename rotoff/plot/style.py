"""Colours, hatches and units of pictures, and how they are saved.

Colours that can be adjacent differ in lightness (CIE L*) by at least 15, and recomputation and idle time are hatched as
well, so that pictures stay readable in grey and with every kind of colour blindness. The hues are Okabe and Ito's
("Color Universal Design", 2008) or darker and lighter forms of them.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import OptionError

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

BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
# No box around the data, a faint grid behind it, small letters.
_AXES = {
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True},
    **{"grid.color": "#D9D9D9", "grid.linewidth": 0.6, "xtick.labelsize": 8, "ytick.labelsize": 8},
    "axes.labelsize": 9,
}


class Picture(Figure):  # type: ignore[misc]
    """A figure that notebooks show, although it belongs to no window. Sizes are in inches."""

    def __init__(self, width: float = 6.4, height: float = 4.8) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def subplots(self, *args: Any, **kwargs: Any) -> Any:
        with matplotlib.rc_context(_AXES):
            return super().subplots(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        made = io.BytesIO()
        self.savefig(made, format="png", dpi=100)
        return made.getvalue()


def in_units(axes: Axes, which: str, units: tuple[tuple[str, float], ...], what: str) -> None:
    """Label an axis, "x" or "y", in the largest of `units` that it reaches; call it once the axis has its limits. Its
    data are bytes or seconds."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    name, size = next((unit for unit in units if high >= unit[1]), units[-1])
    ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low / size, high / size)
    ticks = [tick for tick in ticks if low <= tick * size <= high]
    axis.set_ticks([tick * size for tick in ticks], [f"{tick:.10g}" for tick in ticks])
    axis.set_label_text(f"{what} ({name})")


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
