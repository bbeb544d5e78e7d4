"""How the link's bandwidth is measured: as copies run in a step, where they use the processor's caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from allocated import peak_bytes
from torch import nn

import rotoff
from rotoff.runtime.links import bandwidth
from rotoff.runtime.links import pool as link_pool
from rotoff.runtime.links.bandwidth import PIECE_BYTES, measure_bandwidth
from rotoff.runtime.links.base import Link, Range
from rotoff.runtime.links.cuda import StreamLink
from rotoff.runtime.links.file import FileLink
from rotoff.runtime.links.host_file import HostFile
from rotoff.runtime.links.pool import LinkPool

pytestmark = pytest.mark.full_timing
HOT, COLD, CACHE_BYTES = 12e9, 5e9, 8 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Copy:
    def __init__(self, nbytes: int) -> None:
        self.left, self.begin, self.end = nbytes / COLD, 0.0, 0.0

    def span(self, _: float) -> tuple[float, float]:
        return self.begin, self.end  # less the machine's uptime, a time of nanoseconds would be rounded


class CachedLink(Link):
    """Copies at HOT B/s bytes that lie in the caches, at COLD B/s all else; the first of each place takes a second
    more. `cool`: what kernels do to the caches. room: bytes of the host. own_room: of the device at once. Seconds: waits, to go on after a copy; drains, to
    look whether copies have ended; starts, to start that of a tensor."""

    def __init__(self, clock: Clock, room: int = 1 << 40, own_room: int = 1 << 40, **seconds: float) -> None:
        self.device = torch.device("cpu")
        self.capacity = 0
        self._clock, self._room, self._own_room = clock, room, own_room
        self._seconds = dict.fromkeys(("waits", "drains", "starts"), 0.0) | seconds
        self.filled: list[list[int]] = []  # the bytes of each tensor of a copy back
        self.own: list[int] = []  # bytes that were allocated on the device
        self._warm: set[int] = set()
        self._seen: set[tuple[int, bool]] = set()

    def reserve(self, nbytes: int, whole: Sequence[Range] = ()) -> None:
        if nbytes > self._room:
            raise rotoff.ExecutionError("no room")
        self.capacity = max(self.capacity, nbytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._own_room:
            raise torch.OutOfMemoryError("no room")
        self.own.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def stand_in(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def cool(self, *_: Any) -> None:
        self._warm.clear()

    def _copy(self, tensors: Any, offset: int, out: bool) -> Copy:
        nbytes = sum(one.numel() for one in tensors)
        assert offset + nbytes <= self.capacity
        copy = Copy(nbytes)
        copy.begin = self._clock.now = self._clock.now + self._seconds["starts"] * len(tensors)
        hot = offset in self._warm and nbytes <= CACHE_BYTES
        copy.end = copy.begin + nbytes / (HOT if hot else COLD) + ((offset, out) not in self._seen)
        self._clock.now = copy.end
        self._warm.add(offset)
        self._seen.add((offset, out))
        return copy

    def copy_out(self, sources: Any, offset: Any) -> Copy:
        return self._copy(sources, offset, True)

    def copy_in(self, targets: Any, offset: Any, *after: Any) -> Copy:
        self.filled.append([one.numel() for one in targets])
        return self._copy(targets, offset, False)

    def wait(self, ticket: Any) -> None:
        self._clock.now += self._seconds["waits"]

    def drain(self) -> None:
        self._clock.now += self._seconds["drains"]

    def close(self) -> None:
        self.capacity = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bandwidth, "time", clock)
    monkeypatch.setattr(bandwidth, "_run_kernels", lambda *_: None)
    return clock


@pytest.mark.parametrize("nbytes", [10, 3 << 20, 30 << 20])
def test_copies_through_caches_are_measured_beside_kernels_and_into_new_memory(
    nbytes: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = CachedLink(clock, waits=1.0)
    monkeypatch.setattr(bandwidth, "_run_kernels", link.cool)
    out, back = measure_bandwidth(link, nbytes)
    assert (out, back) == (pytest.approx(COLD, rel=1e-3), pytest.approx(COLD, rel=1e-3))
    assert link.capacity == nbytes
    back = min(nbytes, PIECE_BYTES)
    assert link.filled == [[back]] * len(link.filled)
    assert link.own == [back] * len(link.filled)


def test_no_more_is_copied_back_at_a_time_than_there_is_room_for(clock: Clock) -> None:
    link = CachedLink(clock, waits=1.0)
    measure_bandwidth(link, 16 << 20, room=3 << 20)
    measure_bandwidth(link, 16 << 20, room=1)
    assert {*link.own} == {3 << 20, 64 << 10}
    assert {(len(sizes), sizes[0]) for sizes in link.filled} == {(1, 3 << 20), (64, 64 << 10)}


def test_the_link_is_measured_within_the_limit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    x, limit = torch.randn(512, 64), 1 << 20
    wrapped = rotoff.Checkpointable(model).compute_sequence(limit)

    def step() -> None:
        model.zero_grad()
        wrapped(x).sum().backward()

    step()
    assert peak_bytes(step) <= limit  # of the step before which the plan is made
    assert wrapped.sequence is not None


@pytest.mark.parametrize(("nbytes", "rate"), [(64 << 10, HOT), (1 << 20, HOT), (40 << 20, COLD)])
def test_queued_copies_are_timed_together(clock: Clock, nbytes: int, rate: float) -> None:
    link = CachedLink(clock, drains=50e-6)
    link.queues = True
    out, back = measure_bandwidth(link, nbytes)
    assert (out, back) == (pytest.approx(rate, rel=0.3), pytest.approx(rate, rel=0.3))
    assert out > 1.5 * nbytes / (nbytes / HOT + 50e-6) or nbytes > 32 << 20  # of one copy, awaited
    assert link.capacity == nbytes
    assert (FileLink.queues, StreamLink.queues) == (False, True)


def test_the_time_to_start_the_copy_of_a_tensor_is_a_part_of_the_rate(clock: Clock) -> None:
    link = CachedLink(clock, starts=50e-6)
    link.queues = True
    for rate in measure_bandwidth(link, 16 << 20):
        assert rate == pytest.approx(PIECE_BYTES / (PIECE_BYTES / COLD + 50e-6), rel=0.01)


def test_pinned_memory_is_released_after_measuring_bandwidth(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only recomputes has none at all, and a link whose memory steps have used keeps it."""
    made: list[CachedLink] = []

    def new(*_: object) -> CachedLink:
        made.append(CachedLink(clock))
        made[-1].queues = True
        return made[-1]

    monkeypatch.setattr(link_pool, "new_link", new)
    monkeypatch.setattr(link_pool, "_shares", {})
    pool = LinkPool()
    assert pool.bandwidth(torch.device("cpu"), 48 << 20)[0] == pytest.approx(COLD)
    assert [link.capacity for link in made] == [0]
    pool.give_back(pool.take(torch.device("cpu"), 100 << 20))
    pool.bandwidth(torch.device("cpu"), 1 << 20)
    assert [link.capacity for link in made] == [0, 100 << 20, 0]


def test_a_host_without_room_for_any_copy_is_an_error(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_pool, "new_link", lambda *_: TwoWays(clock, (0.5, 0.5), room=1 << 19))
    with pytest.raises(rotoff.ExecutionError, match="no room"):
        LinkPool().bandwidth(torch.device("cpu"), 48 << 20)


class TwoWays(CachedLink):
    """Copies queue, on a lane for each direction, at COLD B/s, and at those shares of it while both are busy."""

    queues = True

    def __init__(self, clock: Clock, shares: tuple[float, float], **rooms: int) -> None:
        super().__init__(clock, **rooms)
        self._shares, self.copies = shares, 0
        self._lanes: tuple[list[Copy], list[Copy]] = [], []

    def _copy(self, tensors: Any, offset: int, out: bool) -> Copy:
        nbytes = sum(one.numel() for one in tensors)
        assert offset + nbytes <= self.capacity
        self.copies += 1
        self._lanes[not out].append(Copy(nbytes))
        return self._lanes[not out][-1]

    def drain(self) -> None:
        while heads := [(lane[0], lane, share) for lane, share in zip(self._lanes, self._shares, strict=True) if lane]:
            speeds = [share if len(heads) == 2 else 1.0 for _, _, share in heads]
            step = min(head.left / speed for (head, _, _), speed in zip(heads, speeds, strict=True))
            for (head, lane, _), speed in zip(heads, speeds, strict=True):
                head.begin = head.begin or self._clock.now
                head.left -= step * speed
                if head.left < 1e-12:
                    head.end = self._clock.now + step
                    lane.pop(0)
            self._clock.now += step


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.9, 0.4), (0.5, 0.5), (0.3, 0.25)])
@pytest.mark.parametrize("nbytes", [1 << 20, 48 << 20])
@pytest.mark.grid
def test_both_directions_are_measured_alone_and_together(
    shares: tuple[float, float], nbytes: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_pool, "_shares", {})
    made: list[TwoWays] = []
    monkeypatch.setattr(link_pool, "new_link", lambda *_: made.append(TwoWays(clock, shares)) or made[-1])
    for _ in range(2):
        rates = LinkPool().bandwidth(torch.device("cpu"), nbytes)
        assert rates[:3] == (pytest.approx(COLD), pytest.approx(COLD), True)
        assert rates[3:] == (pytest.approx(shares[0] * COLD, rel=0.01), pytest.approx(shares[1] * COLD, rel=0.01))
    assert made[1].copies < made[0].copies  # it is the machine's, and found once
    link = TwoWays(clock, shares)
    assert bandwidth.bidirectional_shares(link) == pytest.approx(shares, rel=0.01)
    assert link.capacity <= 256 << 20


@pytest.mark.parametrize(("nbytes", "rooms"), [(48 << 20, {"room": 20 << 20}), (1 << 20, {"own_room": 1 << 20})])
def test_bandwidth_is_measured_without_room_for_both_directions(
    nbytes: int, rooms: dict[str, int], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_pool, "new_link", lambda *_: TwoWays(clock, (0.5, 0.5), **rooms))
    monkeypatch.setattr(link_pool, "_shares", {})
    rates = LinkPool().bandwidth(torch.device("cpu"), nbytes)
    assert rates == (pytest.approx(COLD), pytest.approx(COLD), True, None, None)
    assert not link_pool._shares


def test_bytes_for_measuring_are_file_backed_if_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FileLink(tmp_path)
    taken = []

    def take() -> None:
        taken.append(link.stand_in(1 << 20))
        taken[0].fill_(7)

    assert peak_bytes(take) == 0
    link.reserve(1 << 20)
    link.wait(link.copy_out(taken, 0))
    back = torch.zeros(1 << 20, dtype=torch.uint8)
    link.wait(link.copy_in([back], 0))
    assert bool((back == 7).all())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(HostFile, "reserve", Mock(side_effect=rotoff.ExecutionError("the disk has no room")))
    assert peak_bytes(lambda: link.stand_in(1 << 20)) == 1 << 20
    link.close()
