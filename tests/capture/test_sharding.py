"""Which modules gather parameters from other processes while they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotoff
from rotoff.capture.sharding import gathers
from rotoff.profile import stage_bytes


def test_parameters_of_one_process_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a stage that saves them is not run again and again for a collective's sake."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not gathers(model)
    runs = []
    kept = stage_bytes.keep_everything
    monkeypatch.setattr(
        stage_bytes, "keep_everything", lambda run, *rest: runs.append(run.stage.name) or kept(run, *rest)
    )
    rotoff.Checkpointable(model).measure(torch.randn(2, 4), repeats=1)
    assert runs == ["0", "1"]
