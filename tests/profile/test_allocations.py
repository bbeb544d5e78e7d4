"""What is read from a log of an allocator's blocks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import rotoff
from rotoff.profile.memory import allocator
from rotoff.profile.memory.allocator import UNSPLIT, Allocation, AllocationLog, DeviceAllocator

MIB = 1 << 20


def test_unsplit_block_counts_as_requested_size() -> None:
    log = AllocationLog(
        (
            Allocation(1, 20 * MIB),  # a temporary
            Allocation(1, -20 * MIB),
            Allocation(1, 20 * MIB),  # of 19.5 MiB
            Allocation(2, 3 * MIB),  # as asked for
            Allocation(3, 5 * MIB),  # gone by the end
            Allocation(3, -5 * MIB),
            Allocation(4, 9 * MIB),  # of no tensor that is known
        )
    )
    sizes = {1: 39 * MIB // 2, 2: 3 * MIB, 3: 4 * MIB, 7: MIB}
    found = log.sized(sizes)
    assert [event.size for event in found.events] == [
        20 * MIB, -20 * MIB, 39 * MIB // 2, 3 * MIB, 5 * MIB, -5 * MIB, 9 * MIB,
    ]  # fmt: skip
    assert log.level() - found.level() == MIB // 2
    assert log.sized({4: 9 * MIB - UNSPLIT - 512}) == log  # not what the allocator leaves: the storage is another


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
        allocator.record(littering, device)  # the allocator knows the sizes of what a log has seen
        _, log = allocator.record(busy, device)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*often)
    assert log.level() == 0


def test_allocator_without_events_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [AllocationLog(()), AllocationLog((Allocation(1, 512), Allocation(1, -512)))]
    monkeypatch.setattr(allocator, "_checked", set())
    monkeypatch.setattr(allocator, "record", lambda *_: (None, logs.pop(0)))
    with pytest.raises(rotoff.MeasureError, match="allocator of cuda:0 reports no events.*cudaMallocAsync"):
        DeviceAllocator(torch.device("cuda", 0))
    for _ in range(2):
        DeviceAllocator(torch.device("cuda", 0))
    assert not logs


@pytest.mark.parametrize("told", ["", "expandable_segments:True", "roundup_power2_divisions:4,max_split_size_mb:64"])
def test_block_enlarging_options_are_logged(
    told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AllocationLog((Allocation(1, 512), Allocation(1, -512)))
    monkeypatch.setattr(allocator, "_checked", set())
    monkeypatch.setattr(allocator, "record", lambda *_: (None, log))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", told)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with caplog.at_level("WARNING", "rotoff"):
        for _ in range(2):
            DeviceAllocator(torch.device("cuda", 0))
    said = "option max_split_size_mb and roundup_power2_divisions makes blocks larger"
    assert caplog.text.count("makes blocks larger") == (said in caplog.text) == ("64" in told)
