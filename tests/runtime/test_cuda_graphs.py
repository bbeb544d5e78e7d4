"""Modules compiled with CUDA graphs are refused on CUDA, however they were compiled; nothing is compiled to find
out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotoff


@pytest.mark.parametrize("measured", [True, False])
def test_a_planned_step_is_refused_within_a_capture_and_the_plain_one_is_not(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), torch.randn(64, 8)
    model = rotoff.Checkpointable(plain, cache_directory=None).measure(x)
    everything, least = model.keep_all_memory, model.min_mem_limit()
    model = model if measured else rotoff.Checkpointable(plain, cache_directory=None)
    model.compute_sequence(least)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(rotoff.MeasureError, match="while a CUDA graph is captured.*a limit that keeps everything"):
        model(x)
    with torch.no_grad():
        model(x)
    if measured:
        model.compute_sequence(everything)
        model(x).sum().backward()
