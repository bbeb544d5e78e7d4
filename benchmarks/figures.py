"""Draw step time against memory: for `docs/method.md` from what `solver_quality.py --figure` measured, and for
`docs/parameters.md` from what `parameter_grid.py` measured of one chain.

python benchmarks/figures.py method benchmarks/results/solver_figure.json docs/method.png
python benchmarks/figures.py parameters benchmarks/results/parameter_grid.json docs/parameters.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# Colours that differ in brightness too (Okabe and Ito's), and markers, for print and for the colour-blind.
METHOD = {
    "dp_50": ("dynamic program, N = 50", "#E69F00", "o", ":"),
    "dp_100": ("dynamic program, N = 100", "#56B4E9", "s", ":"),
    "dp_150": ("dynamic program, N = 150", "#009E73", "^", ":"),
    "solve": ("rotoff.solve", "#D55E00", "D", "-"),
    "bound": ("certified bound", "#000000", None, "--"),
}
PARAMETERS = {
    "zero-offload": ("ZeRO-Offload", "#E69F00", "o", ":"),
    "streaming": ("all streamed", "#56B4E9", "s", ":"),
    "by_hand": ("best of some 70 by hand", "#009E73", "^", ":"),
    "step": ("rotoff.solve", "#D55E00", "D", "-"),
    "endless": ("bound, endless training", "#999999", None, "--"),
    "bound": ("certified bound", "#000000", None, "--"),
}


def draw(panels: dict[str, list[dict[str, Any]]], x: str, unit: float, styles: dict[str, Any]) -> tuple[Any, Any]:
    """A panel for each title and its rows: `styles` by column, against column `x` in `unit`."""
    width = 5 * len(panels)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(width, 3.8), sharey=True, layout="constrained")
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        for key, (label, colour, marker, line) in styles.items():
            if points := [(row[x] / unit, row[key]) for row in rows if row[key]]:
                axis.plot(*zip(*points, strict=True), line, color=colour, marker=marker, markersize=4, label=label)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[-1].legend(frameon=False, fontsize=8)
    return figure, axes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=("method", "parameters"))
    parser.add_argument("data", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--chain", default="gpt-6.7b", help="of the parameters' grid")
    arguments = parser.parse_args()
    rows = json.loads(arguments.data.read_text())["rows"]
    if arguments.page == "method":
        panels = {chain: [row for row in rows if row["chain"] == chain] for chain in sorted({r["chain"] for r in rows})}
        figure, axes = draw(panels, "share", 1.0, METHOD)
        x, y = "limit / peak of keeping everything", "step time / that of keeping everything"
    else:
        rows = sorted((row for row in rows if row["chain"] == arguments.chain), key=lambda row: row["limit"])
        panels = {
            f"{arguments.chain}, updates {updates} the backward": [row for row in rows if row["updates"] == updates]
            for updates in ("during", "after")
        }
        figure, axes = draw(panels, "limit", 1e9, PARAMETERS)
        x, y = "device memory / GB", "step time / forward and backward alone"
    axes[0].set_ylabel(y)
    for axis in axes:
        axis.set_xlabel(x)
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
