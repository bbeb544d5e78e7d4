"""Colours, hatches and units of pictures, and how they are saved.

Colours that can be adjacent differ in lightness (CIE L*) by at least 15, and recomputation and idle time are hatched as
well, so that pictures stay readable in grey and with every kind of colour blindness. The hues are Okabe and Ito's
("Color Universal Design", 2008) or darker and lighter forms of them.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from ..core.sizes import SECONDS
from ..errors import OptionError

INK = "#222222"
GRID = "#D9D9D9"


@dataclass(frozen=True)
class Look:
    """Fill colour, hatch and the words of a legend."""

    colour: str
    words: str
    hatch: str = ""


FORWARD = Look("#A6D4F2", "forward")
RECOMPUTE = Look("#D55E00", "forward again (recompute)", "////")
BACKWARD = Look("#0A4D80", "backward")
IDLE = Look("#FFFFFF", "idle: compute waits for a copy", "xxxx")
OUTWARD = Look("#E69F00", "device → host")
INWARD = Look("#00694B", "host → device")
UPDATE = Look("#D98FB6", "update on the device", "....")
PARAMETERS_OUT = Look("#FBE5B0", "device → host, parameters")
PARAMETERS_IN = Look("#8FD3BC", "host → device, parameters")
HOST_UPDATE = Look("#CFA5BC", "update on the host")
LOOKS = (FORWARD, RECOMPUTE, BACKWARD, UPDATE, IDLE, OUTWARD, PARAMETERS_OUT, INWARD, PARAMETERS_IN, HOST_UPDATE)
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

_BYTES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


def byte_unit(most: float) -> tuple[str, int]:
    """The binary unit for an axis of up to `most` bytes, and its size in bytes."""
    return next(((name, size) for name, size in reversed(_BYTES) if most >= size), _BYTES[0])


def time_unit(most: float) -> tuple[str, float]:
    """The unit for an axis of up to `most` seconds, and its length in seconds."""
    return next(((name, size) for name, size in SECONDS if most >= size), SECONDS[-1])


class Picture(Figure):  # type: ignore[misc]
    """A figure that notebooks show, although it belongs to no window."""

    def _repr_png_(self) -> bytes:
        made = io.BytesIO()
        self.savefig(made, format="png", dpi=100)
        return made.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """A figure with a constrained layout; sizes in inches."""
    return Picture(figsize=(width, height), layout="constrained")


def quiet(axes: Axes, grid: str = "y") -> None:
    """Remove the box around the data and put a faint grid behind it."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.tick_params(labelsize=8)


def in_units(axes: Axes, which: str, size: float, name: str, what: str) -> None:
    """Label an axis whose data are bytes or seconds in a larger unit; call it once the axis has its limits."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:.10g}"))
    axis.set_major_locator(MultipleLocator(_round_step((high - low) / size / 6) * size))
    axis.set_label_text(f"{what} ({name})", fontsize=9)


def _round_step(step: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= step), 10 * power)


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
