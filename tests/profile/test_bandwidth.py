"""What the link's bandwidth is measured over: as many bytes as a step moves, where copies run through the processor's
caches."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import peak_bytes

import rotoff
from rotoff.core.chain import LinkRates
from rotoff.runtime.links import bandwidth
from rotoff.runtime.links import pool as link_pool
from rotoff.runtime.links.bandwidth import COLD_BYTES, measure_bandwidth
from rotoff.runtime.links.base import Link
from rotoff.runtime.links.cuda import CudaLink
from rotoff.runtime.links.file import FileLink
from rotoff.runtime.links.pool import LinkPool

HOT, COLD, CACHE_BYTES = 12e9, 5e9, 8 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class CachedLink(Link):
    """Copies at HOT B/s what it copied within the last CACHE_BYTES, at COLD B/s all else; the first of each takes a
    second more."""

    duplex, cached = False, True

    def __init__(self, clock: Clock, room: int = 1 << 40, beside: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.capacity = 0
        self._clock, self._room, self._beside = clock, room, beside
        self.moved: set[int] = set()  # addresses on the device
        self._recent: OrderedDict[int, int] = OrderedDict()  # offset -> bytes
        self._seen: set[tuple[int, bool]] = set()

    def reserve(self, nbytes: int) -> None:
        if nbytes > self._room:
            raise rotoff.ExecutionError("no room")
        self.capacity = max(self.capacity, nbytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def stand_in(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._beside:
            raise rotoff.ExecutionError("no room beside the device")
        return super().stand_in(nbytes)

    def _copy(self, data: torch.Tensor, offset: int, out: bool) -> int:
        nbytes = data.numel()
        self.moved.add(data.data_ptr())
        assert offset + nbytes <= self.capacity
        later = list(self._recent.items())[::-1]
        between = next((n for n, (place, _) in enumerate(later) if place == offset), None)
        hot = between is not None and sum(size for _, size in later[: between + 1]) <= CACHE_BYTES
        self._clock.now += nbytes / (HOT if hot else COLD) + ((offset, out) not in self._seen)
        self._seen.add((offset, out))
        self._recent[offset] = nbytes
        self._recent.move_to_end(offset)
        return 0

    def copy_out(self, sources: Any, offset: int) -> int:
        return self._copy(sources[0], offset, True)

    def copy_in(self, targets: Any, offset: int, after: Any) -> int:
        return self._copy(targets[0], offset, False)

    def wait(self, ticket: Any) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bandwidth, "time", clock)
    return clock


@pytest.mark.parametrize(("step_bytes", "rate"), [(0, HOT), (4 << 20, HOT), (48 << 20, COLD), (1 << 40, COLD)])
def test_copies_cycle_over_the_bytes_of_a_step(clock: Clock, step_bytes: int, rate: float) -> None:
    link = CachedLink(clock)
    out, back = measure_bandwidth(link, 3 << 20, step_bytes)
    assert (out, back) == (pytest.approx(rate), pytest.approx(rate))
    assert link.capacity == max(3 << 20, -(-min(step_bytes, COLD_BYTES) // (3 << 20)) * (3 << 20))


def test_uncached_link_is_measured_with_one_value(clock: Clock) -> None:
    link = CachedLink(clock)
    link.cached = False
    out, back = measure_bandwidth(link, 3 << 20, 1 << 40)
    assert (out, back) == (pytest.approx(HOT), pytest.approx(HOT))
    assert link.capacity == 3 << 20
    assert (FileLink.cached, CudaLink.cached) == (True, False)


class SeenLate(CachedLink):
    """A look whether copies have ended takes 50 microseconds."""

    def drain(self) -> None:
        self._clock.now += 50e-6


@pytest.mark.parametrize(("nbytes", "rate"), [(64 << 10, HOT), (1 << 20, HOT), (300 << 20, COLD)])
def test_queued_copies_are_timed_together(clock: Clock, nbytes: int, rate: float) -> None:
    link = SeenLate(clock)
    link.cached = False
    one = measure_bandwidth(link, nbytes)
    link.queues = True
    out, back = measure_bandwidth(link, nbytes)
    assert (out, back) == (pytest.approx(rate, rel=0.3), pytest.approx(rate, rel=0.3))
    assert out > 1.5 * one[0] or nbytes > 32 << 20
    assert link.capacity == nbytes
    assert (FileLink.queues, CudaLink.queues) == (False, True)


def test_queueing_link_copies_at_most_256_mib(clock: Clock) -> None:
    for nbytes, reserved in ((100 << 20, 100 << 20), (3 << 30, 256 << 20)):
        link = CachedLink(clock)
        link.cached, link.queues = False, True
        measure_bandwidth(link, nbytes, 40 * nbytes)
        assert link.capacity == reserved


def test_pinned_memory_is_released_after_measuring_bandwidth(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only recomputes has none at all, and a link whose memory steps have used keeps it."""
    made: list[Closing] = []

    class Closing(CachedLink):
        cached, queues, closed = False, True, False

        def __init__(self, *_: object) -> None:
            super().__init__(clock)
            made.append(self)

        def close(self) -> None:
            self.closed, self.capacity = True, 0

    monkeypatch.setattr(link_pool, "new_link", Closing)
    monkeypatch.setattr(link_pool, "_shares", {})
    pool = LinkPool()
    assert pool.bandwidth(torch.device("cpu"), 3 << 30)[0] == pytest.approx(COLD)
    assert [link.closed for link in made] == [True]
    assert pool._taken == {}
    pool.give_back(pool.take(torch.device("cpu"), 100 << 20))
    pool.bandwidth(torch.device("cpu"), 1 << 20)
    assert (len(made), made[1].closed, made[1].capacity) == (2, False, 100 << 20)


def test_little_host_memory_is_enough_for_remat(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_pool, "new_link", lambda *_: TwoWays(clock, (0.5, 0.5), room=20 << 20))
    monkeypatch.setattr(link_pool, "_shares", {})
    rates = LinkPool().bandwidth(torch.device("cpu"), 3 << 30)
    assert rates == (pytest.approx(COLD), pytest.approx(COLD), True, None, None)
    monkeypatch.setattr(link_pool, "new_link", lambda *_: TwoWays(clock, (0.5, 0.5), room=1 << 19))
    with pytest.raises(rotoff.ExecutionError, match="no room"):
        LinkPool().bandwidth(torch.device("cpu"), 3 << 30)


class Copy:
    def __init__(self, nbytes: int) -> None:
        self.left, self.begin, self.end = nbytes / COLD, 0.0, 0.0

    def span(self, zero: float) -> tuple[float, float]:
        return self.begin - zero, self.end - zero


class TwoWays(CachedLink):
    """Copies queue, on a lane for each direction, at COLD B/s, and at those shares of it while both are busy."""

    duplex, cached, queues = True, False, True

    def __init__(self, clock: Clock, shares: tuple[float, float], room: int = 1 << 40) -> None:
        super().__init__(clock, room)
        self._shares, self.copies = shares, 0
        self._lanes: tuple[list[Copy], list[Copy]] = [], []

    def _copy(self, data: torch.Tensor, offset: int, out: bool) -> Copy:
        assert offset + data.numel() <= self.capacity
        self.copies += 1
        self._lanes[not out].append(Copy(data.numel()))
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
@pytest.mark.parametrize("nbytes", [1 << 20, 3 << 30])
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


def test_bandwidth_is_measured_without_room_for_both_directions(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(TwoWays):
        def allocate(self, nbytes: int) -> torch.Tensor:
            if nbytes > 1 << 20:
                raise torch.OutOfMemoryError("no room")
            return super().allocate(nbytes)

    monkeypatch.setattr(link_pool, "new_link", lambda *_: Full(clock, (0.5, 0.5)))
    monkeypatch.setattr(link_pool, "_shares", {})
    rates = LinkPool().bandwidth(torch.device("cpu"), 1 << 20)
    assert rates == (pytest.approx(COLD), pytest.approx(COLD), True, None, None)
    assert not link_pool._shares


def test_host_with_room_for_one_value_is_enough(clock: Clock) -> None:
    link = CachedLink(clock, room=5 << 20)
    assert measure_bandwidth(link, 3 << 20, 1 << 40) == (pytest.approx(HOT), pytest.approx(HOT))
    assert link.capacity == 3 << 20
    with pytest.raises(rotoff.ExecutionError, match="no room"):
        measure_bandwidth(link, 6 << 20, 1 << 40)


@pytest.mark.parametrize(
    ("step_bytes", "beside", "values"), [(10 << 20, 12 << 20, 4), (10 << 20, 11 << 20, 1), (0, 0, 1)]
)
def test_device_bytes_vary_if_there_is_room(clock: Clock, step_bytes: int, beside: int, values: int) -> None:
    link = CachedLink(clock, beside=beside)
    measure_bandwidth(link, 3 << 20, step_bytes)
    assert len(link.moved) == values


def test_cpu_bandwidth_buffer_is_file_backed(tmp_path: Path) -> None:
    link = FileLink(tmp_path)
    taken = []

    def take() -> None:
        taken.append(link.stand_in(1 << 20))
        taken[0].fill_(7)

    assert peak_bytes(take) == 0
    link.reserve(1 << 20)
    link.wait(link.copy_out(taken, 0))
    back = torch.zeros(1 << 20, dtype=torch.uint8)
    link.wait(link.copy_in([back], 0, None))
    assert bool((back == 7).all())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(rotoff.ExecutionError, match="reserving"):
        link.stand_in(1 << 50)
    link.close()


def test_file_link_is_measured_over_the_bytes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    real = LinkPool.bandwidth

    def spy(self: LinkPool, device: torch.device, *nbytes: int) -> LinkRates:
        asked.append(nbytes)
        return real(self, device, *nbytes)

    monkeypatch.setattr(LinkPool, "bandwidth", spy)
    for layers in (5, 10):
        model = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(layers)]
        )
        wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(32, 64), repeats=1)
        saved = [stage.saved_bytes for stage in wrapped.chain.stages]
        assert asked[-1] == (sorted(saved)[len(saved) // 2], sum(saved))
        assert 1e6 < wrapped.chain.d2h_bandwidth < 1e12
        assert 1e6 < wrapped.chain.h2d_bandwidth < 1e12
        wrapped.close()


def test_what_all_processes_of_a_host_get_at_once_bounds_each_rate() -> None:
    alone, at_once = LinkRates(15.0, 50.0, True, 12.0, 30.0), LinkRates(10.0, 60.0, True, 5.0, 8.0)
    plain, halves = LinkPool(), LinkPool(half=torch.float16)
    assert plain.shared(alone) == alone
    plain.share = halves.share = at_once
    assert plain.shared(alone) == LinkRates(10.0, 50.0, True, 5.0, 8.0)
    assert halves.shared(alone) == LinkRates(15.0, 50.0, True, 10.0, 16.0)  # half of the bytes move
