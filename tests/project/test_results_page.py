"""The page of results: every aim is judged from figures, and a figure that misses it is said to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2]))
try:
    from benchmarks.grid import aims, report
finally:
    sys.path.pop(0)

MACHINE = {"cpu": "a CPU", "cores": 2, "python": "3.11", "torch": "2.13", "rotoff": "0.1"}


def record(limit: int | None, ratio: float | None, peak: int, **more: Any) -> dict[str, Any]:
    ours = {"predicted_ratio": 1.02, "predicted_peak": peak, "bound_ratio": 1.01, "equal_gradients": True}
    known = ours if limit is not None else dict.fromkeys(ours)
    spread = {} if ratio is None else {"low": ratio - 0.01, "high": ratio + 0.01}
    result = {"status": "ok", "note": "", "ratio": ratio, "step_time": 1.0, "peak_allocated": peak}
    result |= {"peak_reserved": None, "host_bytes": 0, "moved": None} | known | spread | more
    return {"cell": {"limit": limit}, "commit": "abc", "result": result}


def data(**changed: Any) -> dict[str, Any]:
    moved = {"d2h_share": 0.97, "h2d_share": None, "d2h_plan_share": 0.96, "hidden": 0.96, "planned_hidden": 1.0}
    cells = {
        "gpt/plain": record(None, None, 1000),
        "gpt/selective": record(None, 1.1, 700),
        "gpt/joint@60%": record(600, 1.03, 590, moved=moved | changed.pop("moved", {})),
        "gpt/joint@everything": record(2000, 1.005, 1000),
        "gpt/joint@selective": record(700, changed.pop("ratio", 1.02), 690, **changed),
        "gpt/save_on_cpu": {
            "cell": {"limit": None},
            "commit": "abc",
            "result": {"status": "not here", "note": "no device"},
        },
    }
    return {"format": "rotoff.grid", "suite": "cpu", "machine": MACHINE, "threads": 1, "cells": cells}


def missed(**changed: Any) -> list[str]:
    return [aim.aim for aim in aims.judge(aims.read(data(**changed)), "cpu") if aim.met is False]


@pytest.mark.parametrize(
    ("changed", "aim"),
    [
        ({"ratio": 1.2}, "In each peer's own bytes"),
        ({"peak_allocated": 701}, "The limit holds for allocated bytes"),
        ({"predicted_peak": 689}, "The predicted peak"),
        ({"predicted_ratio": 1.2}, "The predicted step time"),
        ({"equal_gradients": False}, "Gradients"),
        ({"moved": {"d2h_share": 0.94}}, "Copies run at 95 %"),
        ({"moved": {"hidden": 0.94}}, "95 % of the copies' time"),
    ],
)
def test_an_aim_is_missed_by_the_figure_that_misses_it_alone(changed: dict[str, Any], aim: str) -> None:
    assert missed() == []
    found = missed(**changed)
    assert any(one.startswith(aim) for one in found), found
    assert len(found) <= 2  # a predicted time or peak may be missed with the measured one


def test_what_is_missed_says_why() -> None:
    grid = data(ratio=1.2)
    note = "the training step needs at least 9 B; the limit is 1 B. The backward of stage 1 alone needs 9 B"
    grid["cells"]["gpt/joint@1%"] = record(1, None, 0, status="infeasible", note=note)
    grid["cells"]["gpt/plain-again"] = record(None, 1.002, 1000)
    found = {aim.aim: aim for aim in aims.judge(aims.read(grid), "cpu")}
    possible = found["There is a plan at every limit"]
    assert possible.found == "in 3 of 4 cells. None: gpt, rotoff joint at 1%."
    assert possible.cause == f"gpt, rotoff joint at 1%: {note}."
    assert found["In each peer's own bytes joint is faster than that peer"].cause == (
        "Plain PyTorch against itself reads gpt +0.2% (-0.8% to +1.2%)."
    )
    assert note in report.page([grid], {})
    level = aims.read(
        data(ratio=1.11) | {"cells": data(ratio=1.11)["cells"] | {"gpt/offload@60%": record(600, 1.01, 590)}}
    )
    first = next(aim for aim in aims.judge(level, "cpu") if aim.aim.startswith("At every limit"))
    assert first.cause.startswith("1 of the 1 are predicted to be level with their rival")


def test_the_bytes_that_a_peers_time_takes() -> None:
    found = {aim.aim: aim.found for aim in aims.judge(aims.read(data()), "cpu")}
    assert found["In a peer's own time joint takes fewer bytes"] == "0.84 of `selective`'s (gpt)."  # 590 of 700


def test_every_kind_of_file_has_its_part_of_the_page() -> None:
    reach = {
        **{"format": "rotoff.reach", "machine": MACHINE, "commit": "abc", "memory_bytes": 12 * 2**30, "of": ["timm 1"]},
        "counted": "all",
        "rows": [
            {"name": "vgg16", "unit": "images", "paper": 224, "reached": 215, "keep_all": 147, "resident_bytes": 1}
            | {"least_bytes": 13_310_000_000, "overhead": 0.02, "binds": "`B 2`", "ran": "not executed"}
        ],
    }
    step = {"step_time": 1.0, "peak_allocated": 400, "resident_bytes": 400, "host_bytes": 0}
    quarter = {
        **{"format": "rotoff.four_times", "about": "GPT", "machine": MACHINE, "threads": 1, "commit": "abc"},
        **{
            "limit": 100,
            "free": step,
            "limited": step,
            "limited_plain": {"fails": True, "failure": ""},
            "equal_losses": True,
        },
        "paired": step | {"ratio": 1.1, "low": 1.09, "high": 1.11, "predicted_ratio": 1.1, "bound_ratio": 1.0},
    }
    page = report.page([data(), quarter, reach], {})
    assert "| vgg16: 224 images | **missed** | planned: 215, and 224 in 13.31 GB; not executed |" in page
    assert "in at most 1.15 of plain's time | met | 1.100 of plain's step" in page
    assert "| rotoff joint in `selective`'s bytes | 1.020 (1.010 to 1.030) | 1.020 | 1.010 |" in page
    assert "Not run: `save_on_cpu`: no device." in page
    quarter["limited"] = {"failure": "no memory"}
    assert "in at most 1.15 of plain's time | **missed** |" in report.page([quarter], {})
