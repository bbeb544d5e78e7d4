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


def test_the_parts_of_a_step_are_told_apart(tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    done = benchmark("step_parts", out, "--workloads", "gpt", "--rounds", "3", "--share", "0.8")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["workloads"]["gpt"]
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["hooked", "moved", "moved in line"]
    assert all(0 < part["low"] <= part["ratio"] <= part["high"] for part in parts.values())
    assert found["expected"] > 0.99
