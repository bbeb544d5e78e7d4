"""The happens-before checker, and by it the order that the stream link keeps: every wait and event of it is needed. The
file link, whose one thread keeps its order, is judged by the bytes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from order_checker import HOST, Recording, Span, check
from recording_link import Lane, LateFileLink, RecordingLink, RecordingStreams
from thoroughness import examples
from transfer_programs import TransferProgram, storages

from rotoff.runtime.links import cuda as link_cuda
from rotoff.runtime.links.cuda import StreamLink

PROGRAMS = range(25)
STEPS = 150


def two_lanes() -> tuple[Recording, int]:
    recording = Recording()
    return recording, recording.new_buffer("the buffer")


class TestChecker:
    def test_memory_is_given_back_after_all_that_touches_it_and_never_touched_again(self):
        recording, buffer = two_lanes()
        recording.allocate("compute", buffer, 8)
        recording.wait("copy", recording.record("compute"))
        recording.access("copy", "copy 0", [], [Span(buffer, 0, 8)])
        recording.release("compute", "free", buffer)
        recording.wait("compute", recording.record("copy"))
        recording.access("compute", "use", [Span(buffer, 0, 8)], [])
        recording.release("compute", "drop", buffer)
        assert check(recording) == [
            "free gives back the buffer on lane compute without waiting for copy 0 on lane copy, which writes there",
            "use on lane compute reads the buffer, which free gave back before",
            "drop gives back the buffer, which free gave back before",
        ]

    def test_fresh_memory_is_touched_after_it_was_taken_and_read_after_it_was_written(self):
        recording, buffer = two_lanes()
        recording.allocate("compute", buffer, 8)
        recording.access("copy", "copy 0", [], [Span(buffer, 0, 4)])
        recording.wait("compute", recording.record("copy"))
        recording.access("compute", "use", [Span(buffer, 2, 6)], [])
        assert check(recording) == [
            "copy 0 on lane copy writes the buffer without waiting for lane compute, which took it from its allocator",
            "use on lane compute reads bytes 2 to 6 of the buffer, not all of which were written before",
        ]

    def test_a_storage_at_the_address_of_a_dead_one_is_another_buffer(self):
        recording = Recording()
        numbers = {recording.buffer(torch.empty(64).untyped_storage()) for _ in range(20)}
        assert len(numbers) == 20
        held = torch.empty(64)
        assert recording.span(held[16:32]) == Span(recording.buffer(held.untyped_storage()), 64, 128)


LANES = ["compute", "out", "in"]
accesses = st.tuples(st.just("access"), st.sampled_from(LANES), st.booleans(), st.integers(0, 1), st.integers(1, 2))
waits = st.tuples(st.just("wait"), st.sampled_from(LANES), st.integers(0, 2))
marks = [st.tuples(st.just(word), st.sampled_from(LANES)) for word in ("record", "finish")]
operations = st.one_of(marks[0], waits, marks[1], accesses, accesses)


def by_reachability(program: list[tuple[Any, ...]]) -> set[int]:
    """The oracle: accesses that race with an earlier one, by search in the graph of what comes before what."""
    before: list[set[int]] = []  # of each operation, all that happen before it
    last: dict[str, int] = {}
    records: list[int] = []
    racing = set()
    for j, (kind, lane, *rest) in enumerate(program):
        own = HOST if kind == "finish" else lane
        direct = {last[name] for name in {own, HOST} if name in last}
        if kind == "wait" and rest[0] < len(records):
            direct.add(records[-1 - rest[0]])
        elif kind == "finish" and lane in last:
            direct.add(last[lane])
        elif kind == "record":
            records.append(j)
        before.append(direct.union(*(before[i] for i in direct)))
        last[own] = j
        if kind == "access":
            writes, low, size = rest
            for i in range(j):
                if program[i][0] == "access" and program[i][1] != lane and i not in before[j]:
                    other_writes, other_low, other_size = program[i][2:]
                    if (writes or other_writes) and low < other_low + other_size and other_low < low + size:
                        racing.add(j)
    return racing


@examples(1500)
@given(st.lists(operations, max_size=20))
def test_the_checker_agrees_with_a_search_in_the_graph(program: list[tuple[Any, ...]]):
    recording, buffer = two_lanes()
    marks: list[int] = []
    for j, (kind, lane, *rest) in enumerate(program):
        if kind == "record":
            marks.append(recording.record(lane))
        elif kind == "wait" and rest[0] < len(marks):
            recording.wait(lane, marks[-1 - rest[0]])
        elif kind == "finish":
            recording.finish(lane)
        elif kind == "access":
            writes, low, size = rest
            spans = [Span(buffer, low, low + size)]
            recording.access(lane, f"op {j}", [] if writes else spans, spans if writes else [])
    found = {int(text.split()[1]) for text in check(recording)}
    assert found == by_reachability(program)


def on_another_stream(link: Any) -> Any:
    """Compute moves to a second stream, which waits for the first as a user's would, and does not wait back."""
    other = Lane("compute 2", eager=True)

    @contextmanager
    def elsewhere():
        streams, event = link.streams, link.streams.event()
        streams.record(event, streams.current())
        streams.wait(other, event)
        with streams.compute_on(other):
            yield

    return elsewhere


class TestStreamLink:
    @pytest.mark.parametrize("eagerness", [0.0, 0.4, 1.0])
    def test_random_programs_race_nowhere_and_see_the_right_bytes(self, eagerness: float):
        reads = 0
        for seed in PROGRAMS:
            link = RecordingLink(eagerness, seed)
            program = TransferProgram(link, seed, elsewhere=on_another_stream(link))
            assert program.run(STEPS) == []
            link.close()
            assert link.check() == []
            reads += len(program.seen)
        assert reads > 1000

    def test_a_copy_that_fails_half_way_leaves_nothing_in_flight(self, monkeypatch: pytest.MonkeyPatch):
        link = RecordingLink()
        link.reserve(16)
        data = [torch.arange(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)]
        link.access("make", [], storages(data))
        copy = RecordingStreams.copy

        def half(self: RecordingStreams, stream: Lane, pairs: Any) -> None:
            copy(self, stream, list(pairs)[:1])
            raise RuntimeError("the device failed")

        monkeypatch.setattr(RecordingStreams, "copy", half)
        with pytest.raises(RuntimeError, match="the device failed"):
            link.copy_out(data, 0)
        gc.collect()
        link.release("give up", storages(data))
        assert link.check() == []
        monkeypatch.undo()
        link.wait(link.copy_out([torch.ones(8, dtype=torch.uint8)], 0))  # and the link still works


class MutantStreams(RecordingStreams):
    """Streams on which one call of the link's, told by its place in the source, does nothing."""

    def __init__(self, mutant: str | None, sites: Counter[str]) -> None:
        super().__init__()
        self.mutant = mutant
        self.sites = sites

    def skipped(self, verb: str) -> bool:
        frame = sys._getframe(2)
        if frame.f_code.co_filename != link_cuda.__file__:
            return False
        site = f"{verb} in {frame.f_code.co_name}, line {frame.f_lineno}"
        self.sites[site] += 1
        return site == self.mutant

    def record(self, event: Any, stream: Any) -> None:
        if not self.skipped("record"):
            super().record(event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        if not self.skipped("wait"):
            super().wait(stream, event)

    def finish(self, stream: Any) -> None:
        if not self.skipped("finish"):
            super().finish(stream)


class MutantLink(RecordingLink):
    def __init__(self, mutant: str | None, sites: Counter[str]) -> None:
        self.streams = MutantStreams(mutant, sites)
        self.log = self.streams.recording
        self._scribble = True
        StreamLink.__init__(self, self.streams)


def first_race(mutant: str | None, sites: Counter[str]) -> str:
    """What the check says of the first program that races; some close their link, others leave that to the
    collector."""
    for seed in PROGRAMS:
        link = MutantLink(mutant, sites)
        TransferProgram(link, seed, elsewhere=on_another_stream(link)).run(STEPS)
        log = link.log
        if seed % 2:
            link.close()
        del link
        gc.collect()
        if found := check(log):
            return found[0]
    return ""


def test_every_single_record_wait_and_finish_of_the_stream_link_is_needed():
    sites: Counter[str] = Counter()
    assert first_race(None, sites) == ""
    assert Counter(site.split()[0] for site in sites) == {"record": 2, "wait": 5, "finish": 2}
    for site in list(sites):
        assert first_race(site, Counter()), f"nothing is lost without: {site}"


class TestFileLink:
    @pytest.mark.parametrize("delay", [0.0, 0.001])
    def test_random_programs_see_the_right_bytes(self, delay: float):
        for seed in range(10):
            link = LateFileLink(delay)
            program = TransferProgram(link, seed)
            assert program.run(STEPS) == []
            link.close()
            assert len(program.seen) > 10

    def test_closing_ends_all_copies_before_the_file_goes(self):
        link = LateFileLink(0.01)
        link.reserve(8)
        ticket = link.copy_out([torch.ones(8, dtype=torch.uint8)], 0)
        link.close()
        assert ticket.failure is None
