"""What is read from a log of an allocator's blocks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import rotoff
from rotoff.profile import allocations
from rotoff.profile.allocations import Event, Log, logged

CUDA = torch.device("cuda", 0)


def test_garbage_collection_is_off_within_a_log() -> None:
    device, often = torch.device("cpu"), gc.get_threshold()

    def littering() -> None:
        cycle: list[Any] = [torch.empty(20480, dtype=torch.uint8)]
        cycle.append(cycle)

    def busy() -> list[list[int]]:
        gc.set_threshold(1, 1, 1)
        return [[n] for n in range(3000)]

    gc.collect()
    gc.set_threshold(1_000_000)
    try:
        logged(littering, device)  # the allocator knows the sizes of what a log has seen
        _, log = logged(busy, device)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*often)
    assert sum(event.size for event in log) == 0


def test_a_log_has_no_regions_of_the_callers() -> None:
    """One that begins in a log and ends in the next would write into memory that the profiler has freed."""
    with Log() as log, torch.autograd.profiler.record_function("of the caller"):
        torch.ones(1)
    names = {event.name() for event in log.kineto_results.events()}
    assert "aten::ones" in names and "of the caller" not in names


def reporting(monkeypatch: pytest.MonkeyPatch, *logs: list[Event]) -> None:
    """A device cuda:0 that is not there, whose allocator reports these events, one list each time."""
    left = list(logs)
    empty = torch.empty
    monkeypatch.setattr(allocations, "_checked", set())
    monkeypatch.setattr(torch, "empty", lambda *size, device: empty(*size))
    monkeypatch.setattr(Log, "events", lambda *_: left.pop(0))


ONE = [Event(512, 1), Event(-512, 1)]


def test_allocator_without_events_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reporting(monkeypatch, [], ONE)
    with pytest.raises(rotoff.MeasureError, match="allocator of cuda:0 reports no events.*cudaMallocAsync"):
        allocations.check_allocator(CUDA)
    for _ in range(2):
        allocations.check_allocator(CUDA)


def test_a_step_is_not_recorded_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would be counted, and a plan exceed its limit without a word; the next step is recorded as ever."""

    def silent(_: torch.device) -> None:
        raise rotoff.MeasureError("reports no events")

    model = rotoff.Checkpointable(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    with monkeypatch.context() as patched:
        patched.setattr("rotoff.profile.recorded_step.check_allocator", silent)
        with pytest.raises(rotoff.MeasureError, match="reports no events"):
            model.measure(torch.randn(4, 8))
    assert model.measure(torch.randn(4, 8)).keep_all_memory


@pytest.mark.parametrize("told", ["", "expandable_segments:True", "roundup_power2_divisions:4,max_split_size_mb:64"])
def test_block_enlarging_options_are_logged(
    told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reporting(monkeypatch, ONE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", told)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with caplog.at_level("WARNING", "rotoff"):
        for _ in range(2):
            allocations.check_allocator(CUDA)
    said = "option max_split_size_mb and roundup_power2_divisions makes blocks larger"
    assert caplog.text.count("makes blocks larger") == (said in caplog.text) == ("64" in told)
