"""The examples run, and what compare_modes prints is true."""

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

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


# As `python EXAMPLE ARGUMENTS`, but with a tenth of the search's default effort, as in the other tests.
QUICKLY = f"""
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
from rotoff.solver import anneal
anneal.DEFAULT_SECONDS *= 0.1
if "train_transformer" in sys.argv[0]:
    sys.path.append({str(ROOT / "tests" / "support")!r})
    import torchvision_operators
    torchvision_operators.declare()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(example: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a user would, against the rotoff that these tests import."""
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent)}
    command = [sys.executable, "-c", QUICKLY, *(str(word) for word in (example, *arguments))]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False)


def test_the_readme_shows_the_quick_start_that_runs_here() -> None:
    code = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "options"),
    [
        ("digits_resnet", "sklearn", "--size 24 --depth 1 --batch 32 --steps 3 --limit 0.85"),
        ("train_transformer", "accelerate", "--layers 2 --width 32 --context 32 --steps 3"),
    ],
)
def test_examples_reach_the_plain_losses(name: str, needs: str, options: str) -> None:
    pytest.importorskip(needs)
    result = run(EXAMPLES / f"{name}.py", *options.split())
    assert result.returncode == 0, result.stderr
    assert "largest difference of any loss: 0.0" in result.stdout


@pytest.mark.slow
def test_a_loop_as_torchtitans_reaches_the_plain_losses() -> None:
    pytest.importorskip("yaml")
    more = (["--plain"], [], ["--checkpoint"])
    runs = [run(EXAMPLES / "titan_loop.py", EXAMPLES / "titan_loop.yaml", *one) for one in more]
    assert [one.returncode for one in runs] == [0] * 3, runs[1].stderr + runs[2].stderr
    plain, *others = ([line for line in one.stdout.splitlines() if line.startswith("step")] for one in runs)
    assert others == [plain, plain] and len(plain) == 4
    assert "moved" in runs[1].stdout or "recomputed" in runs[1].stdout
    assert "layers.0" in runs[2].stdout


@pytest.mark.slow
def test_planning_without_a_device_writes_what_it_prints(tmp_path: Path) -> None:
    result = run(EXAMPLES / "plan_without_device.py", "--blocks", "4", "--limit", "6 GiB", "--out", tmp_path / "plans")
    assert result.returncode == 0, result.stderr
    chain, plan = (
        rotoff.Chain.load(tmp_path / "plans" / "chain.json"),
        rotoff.Sequence.load(tmp_path / "plans" / "sequence.json"),
    )
    assert rotoff.simulate(chain, plan, "6 GiB").peak_bytes > 3 * 2**30
    assert rotoff.render(chain, plan, width=80) in result.stdout
    pytest.importorskip("matplotlib")
    assert (tmp_path / "plans" / "plan.png").read_bytes().startswith(b"\x89PNG")
    refused = run(EXAMPLES / "plan_without_device.py", "--blocks", "4", "--limit", "100 MiB")
    assert refused.returncode == 1
    assert "needs at least" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_beyond_ram_trains_where_plain_pytorch_fails() -> None:
    result = run(EXAMPLES / "beyond_ram.py", "--blocks", "10", "--width", "128", "--room", "160 MiB", "--steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    free, plain, limited = result.stdout.splitlines()[1:4]
    assert "can't allocate memory" in plain
    assert limited.split("losses")[1] == free.split("losses")[1]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = tmp_path_factory.mktemp("compare") / "new folder" / "rows.json"
    result = run(EXAMPLES / "compare_modes.py", "--quick", "--device", "cpu", "--limits", "70,5", "--json", path)
    assert result.returncode == 0, result.stderr
    return result, json.loads(path.read_text(encoding="utf-8"))


def test_compare_modes_tells_what_is_true(quick: Any) -> None:
    result, data = quick
    rows = {(row["limit"], row["mode"]): row for row in data["rows"]}
    limited = [(limit, mode) for limit in ("70 %", "5 %") for mode in ("offload", "remat", "joint")]
    assert [*rows] == [("none", "plain"), ("100 %", "keep-all"), *limited]
    ran = [row for row in data["rows"] if row["loss"] is not None]
    assert len({row["loss"] for row in ran}) == 1 and {row["grad_difference"] for row in ran} == {0.0}
    assert len(ran) >= 5 and ran[0]["measured_peak"] == ran[1]["measured_peak"]
    for row in ran:
        assert row["measured_peak"] <= row["predicted_peak"], row
        if row["host_bytes"] is not None and row["mode"] != "joint":
            assert (row["host_bytes"] > 0) == (row["mode"] == "offload"), row
    assert all(row["predicted_peak"] <= row["mem_limit"] for row in ran[2:])
    for row in data["rows"][-3:]:
        assert row["measured_time"] is None
        assert "does not fit; the smallest limit that works is" in row["note"] and row["note"] in result.stdout
    assert len([line for line in result.stdout.splitlines() if "%" in line]) == len(rows) - 1
    assert result.stderr.splitlines()[0] == "[1/8] measuring the model"
    assert result.stderr.count("/8] ") == 8 and "\r" not in result.stdout + result.stderr
    assert set(data["machine"]) == {"device", "cores", "threads", "python", "torch", "rotoff"}
