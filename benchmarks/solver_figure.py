"""Draw step time against limit, for `docs/method.md`, from what `solver_quality.py --figure` measured.

python benchmarks/solver_figure.py benchmarks/results/solver_figure.json docs/method.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# Colours that differ in brightness too (Okabe and Ito's), and markers, for print and for the colour-blind.
STYLES = {
    "dp_50": ("dynamic program, N = 50", "#E69F00", "o", ":"),
    "dp_100": ("dynamic program, N = 100", "#56B4E9", "s", ":"),
    "dp_150": ("dynamic program, N = 150", "#009E73", "^", ":"),
    "solve": ("rotoff.solve", "#D55E00", "D", "-"),
    "bound": ("certified bound", "#000000", None, "--"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    rows = json.loads(arguments.data.read_text())["rows"]
    chains = sorted({row["chain"] for row in rows})
    figure, axes = pyplot.subplots(1, len(chains), figsize=(5 * len(chains), 3.8), sharey=True, layout="constrained")
    for axis, chain in zip(axes, chains, strict=True):
        for key, (label, colour, marker, line) in STYLES.items():
            points = [(row["share"], row[key]) for row in rows if row["chain"] == chain and row[key] is not None]
            axis.plot(
                *zip(*points, strict=True), line, color=colour, marker=marker, markersize=4, linewidth=1.4, label=label
            )
        axis.set_title(chain)
        axis.set_xlabel("limit / peak of keeping everything")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("step time / that of keeping everything")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.savefig(arguments.picture, dpi=130)


if __name__ == "__main__":
    main()
