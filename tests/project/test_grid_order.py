"""In which order the cells of the grid of benchmarks run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2]))
try:
    from benchmarks.grid import run
finally:
    sys.path.pop(0)

RESULT = {"peak_allocated": 1000, "ratio": 1.0, "low": 1.0, "high": 1.0, "status": "ok"}


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cells that a command line leads to, where each has a result."""
    monkeypatch.setattr(run, "machine", lambda _: {"cores": 2})

    def cells(*arguments: str) -> list[str]:
        grid = run.Grid(tmp_path / "grid.json", run.parse(["--out", str(tmp_path / "grid.json"), *arguments]))
        names = []
        while (following := next(grid.todo(), None)) is not None:
            names.append(following[0])
            grid.data["cells"][following[0]] = {"cell": following[1], "result": RESULT}
        return names

    return cells


def test_on_cuda_one_workload_is_complete_before_the_next(order: Any) -> None:
    names = order("--suite", "cuda", "--workloads", "resnet101", "gpt-1.3b", "--limits", "60", "30")
    workloads = [name.split("/")[0] for name in names]
    assert workloads == sorted(workloads, reverse=True)  # as they were named
    assert [name.split("/")[1] for name in names[:4]] == ["plain", "joint@60%", "joint@30%", "joint@everything"]
    assert names.count("gpt-1.3b/plain") == 1
    assert not any("compiled" in name or "budget" in name for name in names)


def test_on_the_cpu_no_method_has_the_machines_best_hour(order: Any) -> None:
    names = order("--suite", "cpu", "--limits", "60")
    assert names[:5] == ["gpt/plain", "vit/plain", "resnet/plain", "unet/plain", "gpt/joint@60%"]
    by_workload = order("--suite", "cpu", "--limits", "60", "--by", "workload")
    assert by_workload[:2] == ["gpt/plain", "gpt/joint@60%"]
    assert sorted(by_workload) == sorted(names)


def test_compiled_ones_on_request(order: Any) -> None:
    names = order("--suite", "cuda", "--workloads", "gpt-1.3b", "vit-l", "--limits", "60", "--compiled", "vit-l")
    assert {name.split("/")[0] for name in names if "budget" in name} == {"vit-l"}


def test_an_unknown_workload_is_refused(order: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        order("--suite", "cuda", "--workloads", "gpt")
    assert "'gpt' is no workload of suite cuda; it has gpt-1.3b, " in capsys.readouterr().err
