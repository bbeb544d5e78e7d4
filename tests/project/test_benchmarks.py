"""The benchmarks of the runtime run, and write what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rotoff

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def figures(name: str, out: Path, *options: str) -> dict[str, Any]:
    """What the benchmark `name` writes to `out`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The figures that docs/results.md shows."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    files = ("grid_cpu", "four_times")
    return [json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8")) for name in files]


def test_the_page_of_results_is_made_from_the_figures(grid: list[dict[str, Any]]) -> None:
    from benchmarks.grid import report

    pictures = {("cpu", workload): f"results/cpu_{workload}.png" for workload in ("gpt", "vit", "resnet", "unet")}
    page = BENCHMARKS.parent / "docs" / "results.md"
    assert report.page(grid, pictures) == page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_placed_steps(tmp_path: Path) -> None:
    out = tmp_path / "placed.json"
    options = ["--width", "64", "--blocks", "3", "--rows", "256", "--rounds", "1", "--shares", "0.4", "--refine", "0.1"]
    rows = figures("placed_steps.py", out, *options, "--out", str(out))["rows"]
    assert [row["updates"] for row in rows] == ["after", "during"]
    for row in rows:
        assert row["same_bits"]
        assert row["peak"] <= 0.4 * row["everything"]
        assert row["expected"] >= row["unlimited"] > 0
        assert row["moved"] > 0


@pytest.mark.slow
def test_parameter_grid(tmp_path: Path) -> None:
    out = tmp_path / "parameter_grid.json"
    options = ["--chains", "random-12", "--shares", "0.5", "--effort", "0.1", "--json", str(out)]
    found = figures("parameter_grid.py", out, *options)
    assert [row["updates"] for row in found["rows"]] == ["during", "after"]
    for row in found["rows"]:
        assert row["bound"] <= row["step"] <= row["by_hand"]
        assert row["forty"] == pytest.approx(row["step"])
    assert found["summary"]["slower"] == 0


@pytest.mark.slow
def test_promises(tmp_path: Path) -> None:
    out, picture = tmp_path / "promises.json", tmp_path / "promises.png"
    options = ["--models", "GPT", "--scale", "1", "--rounds", "1", "--backends", "--masks"]
    rows = figures("promises.py", out, *options, "--json", str(out), "--picture", str(picture))["rows"]
    ours = [row for row in rows if row["promised"]]
    assert {row["method"] for row in ours} == {"remat", "joint", "selective_policy"}
    for row in ours:
        assert row["equal"] and row["peak"] <= row["promised"] <= row["knob"] * row["keep_all"]
    assert picture.stat().st_size > 1000
