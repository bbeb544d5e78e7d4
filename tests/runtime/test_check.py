"""`check=True`: what the device holds is what the machine says, after every operation; and it notices where it is
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Does, fresh, several
from planned_steps import Beside

import rotoff


def test_keeping_everything_is_checked_too(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh("residual")
    beside = Beside(model, sample=(batch(),), check=True).at(1 << 40)
    beside.step(batch())
    assert not caplog.records
    for one in (beside.plain, beside.model):
        one[2].dropout.forward = lambda x: x.tanh().tanh()
    beside.step(batch())
    assert "made other operations than the planned ones" in caplog.text


def branching(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves several times the bytes once it does more."""
    for layer in net.layers:
        x = x + layer(x)
        if net.more:
            x = torch.cat([x] * 8).sin().tanh().sin().view(8, *x.shape).mean(0)
    return x


def test_a_step_beyond_the_limit_off_course_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Does(branching, layers=several(8, 16, 32), more=False)
    x = torch.randn(64, 16)
    wrapped = rotoff.Checkpointable(model, check=True).measure(x)
    limit = wrapped.min_mem_limit("remat")
    wrapped.compute_sequence(limit, mode="remat", refine=False)
    model.more = True
    wrapped(x).square().sum().backward()
    said = [record.getMessage() for record in caplog.records if "the device holds" in record.getMessage()]
    assert len(said) == 1
    assert f"the limit is {limit} " in said[0]
