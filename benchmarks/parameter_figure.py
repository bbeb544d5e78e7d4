"""Draw step time against device memory, for `docs/parameters.md`, from what `parameter_grid.py` measured of one chain.

python benchmarks/parameter_figure.py benchmarks/results/parameter_grid.json docs/parameters.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {
    "zero-offload": ("ZeRO-Offload", "#E69F00", "o", ":"),
    "streaming": ("all streamed", "#56B4E9", "s", ":"),
    "by_hand": ("best of some 70 by hand", "#009E73", "^", ":"),
    "step": ("rotoff.solve", "#D55E00", "D", "-"),
    "endless": ("bound, endless training", "#999999", None, "--"),
    "bound": ("certified bound", "#000000", None, "--"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--chain", default="gpt-6.7b")
    arguments = parser.parse_args()
    rows = [row for row in json.loads(arguments.data.read_text())["rows"] if row["chain"] == arguments.chain]
    rows.sort(key=lambda row: row["limit"])
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, updates in zip(axes, ("during", "after"), strict=True):
        for key, (label, colour, marker, line) in STYLES.items():
            points = [(row["limit"] / 1e9, row[key]) for row in rows if row["updates"] == updates and row[key]]
            if points:
                axis.plot(*zip(*points, strict=True), line, color=colour, marker=marker, markersize=4, label=label)
        axis.set_title(f"{arguments.chain}, updates {updates} the backward")
        axis.set_xlabel("device memory / GB")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("step time / forward and backward alone")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
