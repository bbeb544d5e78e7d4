"""The grid of benchmarks: cells run, an interrupted run goes on, and the page says what the figures say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def benchmark(name: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    import os

    import rotoff

    environment = {**os.environ, "PYTHONPATH": f"{Path(rotoff.__file__).parent.parent}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--suite", "tiny", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=environment, timeout=300)


def grid(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return benchmark("grid.run", out, "--seconds", "0.1", "--workloads", "gpt", *options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("grid") / "grid.json"
    begun = grid(out, "--limits", "70", "--minutes", "0.01")
    assert begun.returncode == 3, begun.stderr
    some = json.loads(out.read_text())["cells"]
    assert "gpt/plain" in some
    done = grid(out, "--limits", "70")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["cells"]["gpt/plain"] == some["gpt/plain"]  # it went on, and did not begin anew
    return result


def test_every_cell_keeps_its_limit_and_has_plains_gradients(data: dict[str, Any]) -> None:
    ours = [c for name, c in data["cells"].items() if c["cell"]["limit"] and c["result"]["status"] == "ok"]
    assert len(ours) >= 4
    for record in ours:
        result = record["result"]
        assert result["peak_allocated"] <= result["predicted_peak"] <= record["cell"]["limit"]
        assert result["equal_gradients"]
        assert result["pairs"] >= 5


def test_peers_train_the_same_model(data: dict[str, Any]) -> None:
    plain = data["cells"]["gpt/plain"]["result"]
    for peer in ("checkpoint", "checkpoint_sequential", "selective"):
        result = data["cells"][f"gpt/{peer}"]["result"]
        assert result["equal_gradients"], peer
        assert result["peak_allocated"] < plain["peak_allocated"], peer
        assert data["cells"][f"gpt/joint@{peer}"]["cell"]["limit"] == result["peak_allocated"]
    assert data["cells"]["gpt/save_on_cpu"]["result"]["status"] == "not here"


def test_wide_cells_run_again_and_the_closer_run_stays(data: dict[str, Any], tmp_path: Path) -> None:
    out, cells = tmp_path / "grid.json", json.loads(json.dumps(data["cells"]))
    closest, wide = "gpt/checkpoint", "gpt/selective"
    for name, apart in ((closest, 1e-6), (wide, 9e6)):  # more than a busy machine ever makes
        ratio = cells[name]["result"]["ratio"]
        cells[name]["result"].update(low=ratio - apart / 2, high=ratio + apart / 2)
    out.write_text(json.dumps(data | {"cells": cells}))
    done = grid(out, "--limits", "70", "--wider", "8e6")
    assert done.returncode == 0, done.stderr
    after = json.loads(out.read_text())
    found = after["cells"]
    assert {name for name in cells if found[name] != cells[name]} == {wide}
    assert after["twice"] == [wide]
    assert found[wide]["result"]["high"] - found[wide]["result"]["low"] < 8e6
    again = grid(out, "--limits", "70", "--wider", "0")
    assert closest in again.stdout  # it ran, and what there was is the closer one
    last = json.loads(out.read_text())
    assert last["cells"][closest] == found[closest]
    assert {closest, wide} <= set(last["twice"])  # the page tells of both


def test_what_is_expected_of_compiled_stages_is_over_the_plain_models_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.grid import cell, methods
    finally:
        sys.path.remove(str(ROOT))

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def slowed(model: Any) -> None:
        for block in methods.blocks(model):
            block.register_forward_pre_hook(lambda _, given: Slow.apply(*given))

    monkeypatch.setattr(methods, "_compile_blocks", slowed)
    result = cell.measure(cell.Cell("tiny", "gpt", "joint-compiled", 1 << 40, seconds=0.1))
    assert result.status == "ok"
    assert result.predicted_ratio is not None
    assert result.ratio is not None
    assert result.predicted_ratio > 1.5
    assert result.ratio > 1.5  # and so it is: all is kept, and every block waits


def test_the_page_says_what_the_figures_say(data: dict[str, Any]) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.grid import report
    finally:
        sys.path.remove(str(ROOT))
    cells = data["cells"]
    for record, ratio in ((cells["gpt/joint@checkpoint"], 1.5), (cells["gpt/checkpoint"], 1.2)):
        record["result"].update(ratio=ratio, low=ratio - 0.01, high=ratio + 0.01)
    page = report.page([data], {})
    assert "behind in" in page
    assert "Behind: gpt, rotoff joint in `checkpoint`'s bytes, 1.500 to `checkpoint`'s 1.200." in page
    assert "| 1.500 (1.490 to 1.510) |" in page
    cells["gpt/joint@checkpoint"]["result"].update(ratio=1.0, low=0.99, high=1.01)
    assert "Behind: gpt, rotoff joint in `checkpoint`'s bytes" not in report.page([data], {})

    joint, remat = (cells[f"gpt/{mode}@70%"]["result"] for mode in ("joint", "remat"))
    assert joint["status"] == remat["status"] == "ok"
    joint.update(ratio=1.2, low=1.1, high=1.3, plan="ops")
    remat.update(ratio=0.5, low=0.4, high=0.6, plan="other ops")  # whatever the others took, it is the fastest
    assert "Behind: gpt, rotoff joint at 70%, 1.200 to rotoff remat at 70%'s 0.500" in report.page([data], {})
    remat["plan"] = "ops"
    page = report.page([data], {})
    assert "rotoff remat at 70%'s" not in page
    assert "In 1 of the cells another of rotoff's modes found the same plan" in page


def test_the_first_step_is_told_beside_a_plain_one(tmp_path: Path) -> None:
    out = tmp_path / "first.json"
    done = benchmark("first_step", out, "--suite", "tiny", "--workloads", "gpt", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["workloads"]["gpt"]
    assert 0 < found["room"] < found["measured"] and found["plain"] > 0


def test_the_parts_of_a_step_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    done = benchmark("step_parts", out, "--workloads", "gpt", "--rounds", "3", "--share", "0.8")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["workloads"]["gpt"]
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["hooked", "moved", "moved in line"]
    assert all(0 < part["low"] <= part["ratio"] <= part["high"] for part in parts.values())
    assert found["expected"] > found["expected without upkeep"] > 0.99
