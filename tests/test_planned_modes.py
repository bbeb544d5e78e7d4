"""``rotoff.plan``: what training within some bytes of a device would cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import Residual
from torch import nn

import rotoff
from rotoff.tools.mode_comparison import usable_bytes

WIDTH = 256


@pytest.fixture(scope="module")
def blocks() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[Residual(WIDTH) for _ in range(6)], nn.Linear(WIDTH, 8))


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    return torch.empty(8192, WIDTH, device="meta")


def test_the_table_holds_what_the_machine_says(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    found = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100")
    assert [row.mode for row in found] == ["joint", "remat", "offload"]
    assert found.mem_limit == 240 * 2**20 < found.keep_all_bytes
    for row in found:
        assert row.min_mem_limit <= found.mem_limit
        assert row.peak_bytes is not None and row.peak_bytes <= found.mem_limit
        assert row.step_time is not None and row.bound_time is not None
        assert found.keep_all_time <= row.bound_time <= row.step_time
        assert row.overhead == pytest.approx(row.step_time / found.keep_all_time - 1)
    assert found["joint"].step_time <= min(found["remat"].step_time, found["offload"].step_time)
    assert found["remat"].host_bytes == 0 < found["offload"].host_bytes


def test_the_smallest_limit_is_the_smallest(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    least = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes=["remat"])["remat"].min_mem_limit
    at = rotoff.plan(blocks, batch, mem_limit=least, device="V100", modes=["remat"])["remat"]
    assert at.peak_bytes == least
    below = rotoff.plan(blocks, batch, mem_limit=least - 1, device="V100", modes=["remat"])["remat"]
    assert (below.step_time, below.min_mem_limit) == (None, least)
    assert "does not fit" in str(rotoff.plan(blocks, batch, mem_limit=least - 1, device="V100", modes=["remat"]))


def test_what_is_resident_is_said(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    parameters = sum(p.nbytes for p in blocks.parameters())
    found = rotoff.plan(blocks, batch, device="RTX 4090", modes=["remat"])
    assert found.resident_bytes == {
        "parameters": parameters,
        "buffers": 0,
        "gradients": parameters,
        "adam states": 2 * parameters,
        "batch": batch.nbytes,
    }
    assert found.mem_limit == usable_bytes(24 * 2**30) - 4 * parameters - batch.nbytes  # all that is left
    assert found.fits and found["remat"].overhead == 0
    assert not rotoff.plan(blocks, batch, mem_limit="24 GiB", device="RTX 4090", modes=["remat"]).fits
    plain = rotoff.plan(blocks, batch, device="RTX 4090", modes=["remat"], optimizer="sgd")
    assert plain.mem_limit == found.mem_limit + 2 * parameters


def test_json_and_text(blocks: nn.Sequential, batch: torch.Tensor, tmp_path: Path) -> None:
    found = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes=["remat"])
    found.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["modes"][0]["step_time"] == found["remat"].step_time
    assert data["meta"]["times"].startswith("estimated")
    lines = str(found).splitlines()
    assert lines[0] == "Sequential on V100 within 240.00 MiB (times are estimates)"
    assert lines[3].startswith("remat ")


def test_one_mode_may_stand_by_itself(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    (row,) = rotoff.plan(blocks, batch, mem_limit="240 MiB", device="V100", modes="remat").rows
    assert row.mode == "remat"


def test_bad_questions(blocks: nn.Sequential, batch: torch.Tensor) -> None:
    with pytest.raises(rotoff.OptionError, match="device is 'abacus'; known ones are"):
        rotoff.plan(blocks, batch, device="abacus")
    with pytest.raises(rotoff.OptionError, match="optimizer is 'magic'; known ones are sgd, momentum, adam"):
        rotoff.plan(blocks, batch, optimizer="magic")
    for wrong in (["remat", "guess"], "guess", None):
        with pytest.raises(rotoff.OptionError, match="modes are 'joint', 'remat', 'offload'"):
            rotoff.plan(blocks, batch, modes=wrong)
    with pytest.raises(rotoff.OptionError, match="modes is empty"):
        rotoff.plan(blocks, batch, modes=())
    with pytest.raises(rotoff.LimitError, match="looks like a fraction"):
        rotoff.plan(blocks, batch, mem_limit=0.5)
    tiny = rotoff.Device("tiny", 2**20, 1e9, {"float32": 1e9}, 1e9, 1e9)
    with pytest.raises(rotoff.LimitError, match="nothing is left for a step"):
        rotoff.plan(blocks, batch, device=tiny)
