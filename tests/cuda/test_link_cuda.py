"""The CUDA link on a real device: order under adverse timing, speed, pinned bytes.

A sleep kernel in front of a copy, or of the compute that a copy must wait for, makes a missing wait show in the bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer_programs import TransferProgram, pattern

from rotoff import accelerator
from rotoff.runtime.links.cuda import CudaStreams, StreamLink
from rotoff.runtime.links.pinned import PinnedSegment

pytestmark = pytest.mark.cuda

SLEEP = 1_000_000  # cycles, about half a millisecond
MIB = 1 << 20
SIZES = [1, 3, 1000, 4096, 100_000]


class SlowStreams(CudaStreams):
    """The real streams, but each copy starts late, and fresh memory never holds by chance what is to arrive there."""

    def empty(self, nbytes: int) -> torch.Tensor:
        return super().empty(nbytes).fill_(0xA5)

    def copy(self, stream: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
        super().copy(stream, pairs)


class LateProgram(TransferProgram):
    """A program whose compute comes late."""

    def before_compute(self) -> None:
        torch.cuda._sleep(SLEEP)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _all_done() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    gc.collect()


@contextmanager
def opened(link: Any) -> Iterator[Any]:
    try:
        yield link
    finally:
        link.close()


class TestOrder:
    @pytest.mark.parametrize("stream", ["default", "own"])
    @pytest.mark.parametrize("late", ["nothing", "copies", "compute", "both"])
    def test_random_programs_see_the_right_bytes(self, late: str, stream: str, device: torch.device):
        streams = SlowStreams(device) if late in ("copies", "both") else CudaStreams(device)
        program = LateProgram if late in ("compute", "both") else TransferProgram
        with opened(StreamLink(streams)) as link:
            for seed in range(6):
                with torch.cuda.stream(torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()):
                    assert program(link, seed, sizes=SIZES).run(80) == []

    def test_out_of_memory_leaves_a_link_that_works(self, device: torch.device):
        with opened(StreamLink(CudaStreams(device))) as link:
            link.reserve(MIB)
            written = link.copy_out([pattern(MIB, 5, device)], 0)
            with pytest.raises(torch.OutOfMemoryError):
                link.allocate(1 << 48)
            target = link.allocate(MIB)
            link.wait(link.copy_in([target], 0, written))
            assert torch.equal(target.cpu(), pattern(MIB, 5))


@pytest.mark.alone
class TestSpeed:
    SIZE = 256 * MIB

    @pytest.mark.concurrent
    def test_copies_reach_nine_tenths_of_a_plain_pinned_copy(self, device: torch.device, record_property: Any):
        data = torch.ones(self.SIZE, dtype=torch.uint8, device=device)
        pinned = torch.empty(self.SIZE, dtype=torch.uint8, pin_memory=True)
        plain = (
            best_seconds(lambda: pinned.copy_(data, non_blocking=True)),
            best_seconds(lambda: data.copy_(pinned, non_blocking=True)),
        )
        with opened(StreamLink(CudaStreams(device))) as link:
            link.timed = True
            link.reserve(self.SIZE)
            tickets: list[list[Any]] = [[], []]
            for _ in range(6):
                tickets[0].append(link.copy_out([data], 0))
                link.drain()
                tickets[1].append(link.copy_in([data], 0, tickets[0][-1]))
                link.drain()
            ours = [min(one.begin.elapsed_time(one.done) for one in some) / 1e3 for some in tickets]
            for ticket in (*tickets[0], *tickets[1]):
                link.wait(ticket)
        for direction, mine, theirs in zip(("device to host", "host to device"), ours, plain, strict=True):
            record_property(f"{direction}, GB/s", round(self.SIZE / mine / 1e9, 2))
            record_property(f"{direction}, plain pinned copy, GB/s", round(self.SIZE / theirs / 1e9, 2))
            assert mine <= theirs / 0.9


def test_pinned_bytes_are_exact_and_go_with_the_link(device: torch.device) -> None:
    nbytes = 5 * MIB + 123
    link = StreamLink(CudaStreams(device))
    link.reserve(MIB)
    link.reserve(nbytes)
    assert link.capacity == nbytes
    segments = [segment for _, segment in link._slab._segments]
    assert [segment.tensor.numel() for segment in segments] == [MIB, nbytes - MIB]
    assert all(segment.tensor[:1].is_pinned() and segment.tensor[-1:].is_pinned() for segment in segments)
    addresses = [f"{segment.tensor.data_ptr():x}" for segment in segments]
    assert all(segment._address for segment in segments), "the fallback, which rounds up, was used"
    across = pattern(2 * MIB, 3, device)  # lies across the place where it has grown
    written = link.copy_out([across], MIB // 2)
    target = link.allocate(2 * MIB)
    link.wait(link.copy_in([target], MIB // 2, written))
    assert torch.equal(target, across)
    del segments, written
    link.close()
    starts = {row.split("-")[0] for row in Path("/proc/self/maps").read_text().splitlines()}
    assert not starts & set(addresses)


def test_a_failed_registration_is_not_the_next_kernels_error(device: torch.device) -> None:
    segment = PinnedSegment(MIB, device)
    twice = torch.cuda.cudart().cudaHostRegister(segment.tensor.data_ptr(), MIB, 0)
    assert int(twice) != 0
    accelerator._clear_last_error(device)
    assert torch.ones(8, device=device).sum().item() == 8
    segment.close()


def best_seconds(copy: Any) -> float:
    """The shortest of six runs of `copy`, by events."""
    found = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        copy()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found)
