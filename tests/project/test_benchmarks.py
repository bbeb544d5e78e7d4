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


@pytest.mark.slow
def test_prediction(tmp_path: Path) -> None:
    out = tmp_path / "prediction.json"
    options = ["--quick", "--device", "cpu", "--seconds", "0", "--pairs", "2", "--limits", "60,2", "--out", str(out)]
    found = figures("prediction.py", out, *options)
    assert found["machine"]["torch"]
    assert found["machine"]["threads"] == max(1, found["machine"]["cores"] - 1)
    modes = [(row["limit"], row["mode"]) for row in found["rows"]]
    assert modes[0] == (1.0, "joint")
    assert (0.6, "remat") in modes
    assert all(limit > 0.02 for limit, _ in modes)  # nothing fits there
    for row in found["rows"]:
        assert row["pairs"] == 2
        assert row["ratio_error"] == pytest.approx(row["measured_ratio"] / row["predicted_ratio"] - 1)
        assert row["seconds_error"] == pytest.approx(row["measured"] / row["predicted"] - 1)
    kept, remat = found["rows"][0], next(row for row in found["rows"] if row["mode"] == "remat")
    assert kept["predicted_ratio"] == 1
    assert remat["predicted_ratio"] > 1
    assert found["summary"]["rows"] == len(found["rows"])


@pytest.mark.slow
def test_interpreter_cost(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    found = figures("interpreter_cost.py", out, "--repeats", "3", "--json", str(out))
    assert found["torch"]
    assert set(found["hooked"]) == {"us_per_call", "us_per_tensor", "us_per_stage", "us_per_step"}
    assert set(found["run twice"]) == {"us_per_replay", "us_per_call", "us_per_tensor"}


@pytest.mark.slow
def test_no_plan_is_below_the_floor_of_all_forms(tmp_path: Path) -> None:
    out = tmp_path / "floor.json"
    found = figures("forms_floor.py", out, "--quick", "--json", str(out))
    assert len(found["rows"]) == 2
    for row in found["rows"]:
        # without forms a replay stops early, too, so that these gain a little less than half
        assert 0 < row["floor"] <= row["with_forms"] < 0.51 * row["without"]
        assert row["with_forms"] < row["floor"] + 0.01


@pytest.mark.slow
def test_forms(tmp_path: Path) -> None:
    out = tmp_path / "forms.json"
    found = figures("forms.py", out, "--quick", "--json", str(out))
    assert found["machine"]["threads"] == max(1, found["machine"]["cores"] - 1)
    rows = {(r["model"], r["method"], r["forms"], r["at"]): r for r in found["rows"]}
    assert {model for model, *_ in rows} == {"gpt", "vit"}
    assert len(rows) == len(found["rows"]) == 2 * (3 + 5 * 2 * 2)
    for row in found["rows"]:
        assert row["status"] in ("ok", "infeasible")
        assert row["status"] == "infeasible" or row["equal_gradients"]
    assert rows["gpt", "remat", True, "selective"]["limit"] == rows["gpt", "selective", None, ""]["peak"]
    assert rows["gpt", "remat", True, "60%"]["limit"] == int(0.6 * found["keep_all_bytes"]["gpt"])
    assert len(found["overhead_with_forms_over_without"]) == 2 * 5 * 2


@pytest.mark.slow
def test_backward_from(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "backward_from.json"
    (row,) = figures("backward_from.py", out, "--words", "2000", "--json", str(out))["rows"]
    assert row["plain"] <= row["loss"]["keep_all"] <= 1.01 * row["plain"]
    assert row["loss"]["keep_all"] <= row["any"]["keep_all"] - 0.9 * row["logits"]
    assert row["loss"]["least"] < row["any"]["least"] - 0.8 * row["logits"]
    for name in ("any", "loss"):
        assert row[name]["measured"] <= row[name]["expected"] <= row[name]["limit"]


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
