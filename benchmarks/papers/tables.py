"""What the scripts of this folder write: rows as CSV and on the screen, in benchmarks/results/papers/."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "papers"


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with equal keys to ``<name>.csv``, and as text."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    with (RESULTS / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    text = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[n]) for line in [columns, *text]) for n in range(len(columns))]
    print(f"\n{name}")
    for line in [columns, *text]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def figure(across: int = 1, down: int = 1, size: tuple[float, float] = (7, 4.5)):
    """(figure, array of axes) to draw on; call `save` when done. size: of one, in inches."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
    return made, made.subplots(down, across, squeeze=False)


def save(name: str, fig: Any) -> None:
    """``<name>.png`` beside the CSV."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    fig.savefig(RESULTS / f"{name}.png", dpi=130)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
