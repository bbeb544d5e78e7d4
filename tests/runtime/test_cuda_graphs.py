"""Modules compiled with CUDA graphs are refused on CUDA, however they were compiled; nothing is compiled to find
out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff.profile.cuda_graphs import refuse_cuda_graphs
from rotoff.tensors.stage import StageModule


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])
def test_stages_with_cuda_graphs_are_refused(options: dict[str, Any]) -> None:
    inside = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inside[1].compile(**options)
    for module in (inside, torch.compile(nn.Linear(3, 3), **options)):
        with pytest.raises(
            rotoff.MeasureError, match=r"^stage 'block' is compiled with CUDA graphs.* mode=\"default\" or"
        ):
            refuse_cuda_graphs(StageModule("block", (module,)))


@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"backend": "eager"}])
def test_others_are_not(options: dict[str, Any]) -> None:
    inside = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inside[1].compile(**options)
    refuse_cuda_graphs(StageModule("block", (inside, torch.compile(nn.Linear(3, 3), **options))))


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
