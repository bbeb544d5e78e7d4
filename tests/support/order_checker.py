"""Proof of order: every copy, event and use of memory of a run, as recorded, and the check that nothing races.

A lane is what runs in order by itself: the compute stream, a copy stream, the thread of a file link, the host program
that issues everything. Lane A's work happens before lane B's only where an event recorded on A is waited for on B
(Lamport's happens-before; the check carries a vector clock per lane, as race detectors such as FastTrack do). What was
issued after the host itself had waited comes after what it waited for. The order in which operations were issued, or
happened to run, proves nothing.

Rules:

1. Of two accesses from different lanes to the same bytes, one of them a write, the first issued happens before the
  other.
2. Memory that is taken from the allocator is touched only after the point of the lane that took it, since it may be
   recycled; memory that is given back is given back after all accesses to it, and never touched again.
3. Bytes whose birth was recorded are written before they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

HOST = "host"
_weak: Any = reductions.StorageWeakRef  # not typed


class Span(NamedTuple):
    """Bytes `low` to `high` (exclusive) of a buffer."""

    buffer: int
    low: int
    high: int


@dataclass(frozen=True)
class Record:
    """`lane` marks a point of its work."""

    lane: str
    mark: int


@dataclass(frozen=True)
class Wait:
    """What `lane` does from now on comes after the marked point."""

    lane: str
    mark: int


@dataclass(frozen=True)
class Finish:
    """The host waits until `lane` is empty."""

    lane: str


@dataclass(frozen=True)
class Access:
    """`lane` reads and writes bytes."""

    lane: str
    what: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]


@dataclass(frozen=True)
class Allocate:
    """`lane` takes a buffer of `nbytes` bytes from its allocator."""

    lane: str
    buffer: int
    nbytes: int


@dataclass(frozen=True)
class Release:
    """`lane` gives a buffer back to its allocator."""

    lane: str
    what: str
    buffer: int


Entry = Record | Wait | Finish | Access | Allocate | Release


@dataclass
class Recording:
    """What a run did, in the order in which the host issued it.

    entries: the operations. names: what to call each buffer in a message.
    """

    entries: list[Entry] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    _storages: dict[int, tuple[Any, int]] = field(default_factory=dict, repr=False)
    _marks: int = 0

    def new_buffer(self, name: str) -> int:
        """A number for a buffer that is called `name`."""
        number = len(self.names)
        self.names[number] = name
        return number

    def buffer(self, storage: torch.UntypedStorage) -> int:
        """The number of the buffer that `storage` is; held weakly, and never confused with a later one at its
        address."""
        key = storage._cdata
        if key not in self._storages:
            number = self.new_buffer(f"storage {len(self._storages)} ({storage.nbytes()} bytes)")
            # The weak reference frees the bytes but keeps the address of the storage's head from being used again.
            self._storages[key] = (_weak(storage), number)
        return self._storages[key][1]

    def whole(self, storage: torch.UntypedStorage) -> Span:
        """All bytes of `storage`."""
        return Span(self.buffer(storage), 0, storage.nbytes())

    def span(self, tensor: torch.Tensor) -> Span:
        """The bytes of a contiguous tensor."""
        low = int(tensor.storage_offset()) * tensor.element_size()
        return Span(self.buffer(tensor.untyped_storage()), low, low + tensor.numel() * tensor.element_size())

    def record(self, lane: str) -> int:
        self._marks += 1
        self.entries.append(Record(lane, self._marks))
        return self._marks

    def wait(self, lane: str, mark: int) -> None:
        self.entries.append(Wait(lane, mark))

    def finish(self, lane: str) -> None:
        self.entries.append(Finish(lane))

    def access(self, lane: str, what: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        self.entries.append(Access(lane, what, tuple(reads), tuple(writes)))

    def allocate(self, lane: str, buffer: int, nbytes: int) -> None:
        self.entries.append(Allocate(lane, buffer, nbytes))

    def release(self, lane: str, what: str, buffer: int) -> None:
        self.entries.append(Release(lane, what, buffer))


Clock = dict[str, int]  # of each lane, how much of its work is known to have happened


class _Past(NamedTuple):
    """An access that a later one may race with."""

    lane: str
    tick: int
    what: str
    low: int
    high: int
    writes: bool

    def before(self, clock: Clock) -> bool:
        return clock.get(self.lane, 0) >= self.tick

    def said(self) -> str:
        return f"{self.what} on lane {self.lane}, which {'writes' if self.writes else 'reads'} there"


class _Buffer:
    """What is known of one buffer."""

    def __init__(self) -> None:
        self.past: list[_Past] = []
        self.born: tuple[str, int] | None = None
        self.size: int | None = None  # known where the birth is, and then every read needs a write before it
        self.released = ""


class _Checker:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.clocks: dict[str, Clock] = {}
        self.marks: dict[int, Clock] = {}
        self.buffers: dict[int, _Buffer] = {}
        self.violations: list[str] = []

    def run(self) -> list[str]:
        for entry in self.recording.entries:
            clock = self.advance(HOST if isinstance(entry, Finish) else entry.lane)
            if isinstance(entry, Record):
                self.marks[entry.mark] = dict(clock)
            elif isinstance(entry, Wait):
                _join(clock, self.marks[entry.mark])
            elif isinstance(entry, Finish):
                _join(clock, self.clocks.get(entry.lane, {}))
            elif isinstance(entry, Access):
                for span in entry.reads:
                    self.touch(entry, span, clock, writes=False)
                for span in entry.writes:
                    self.touch(entry, span, clock, writes=True)
            elif isinstance(entry, Allocate):
                buffer = self.buffers.setdefault(entry.buffer, _Buffer())
                buffer.born, buffer.size = (entry.lane, clock[entry.lane]), entry.nbytes
            else:
                self.release(entry, clock)
        return self.violations

    def advance(self, lane: str) -> Clock:
        """The clock of `lane` at its next operation, which comes after all that the host had waited for at its
        issue."""
        clock = self.clocks.setdefault(lane, {})
        _join(clock, self.clocks.get(HOST, {}))
        clock[lane] = clock.get(lane, 0) + 1
        return clock

    def touch(self, entry: Access, span: Span, clock: Clock, writes: bool) -> None:
        if span.low >= span.high:
            return
        buffer = self.buffers.setdefault(span.buffer, _Buffer())
        doing = f"{entry.what} on lane {entry.lane} {'writes' if writes else 'reads'}"
        name = self.recording.names[span.buffer]
        part = f"bytes {span.low} to {span.high} of {name}"
        if buffer.released:
            self.violations.append(f"{doing} {name}, which {buffer.released} gave back before")
        if buffer.born is not None and clock.get(buffer.born[0], 0) < buffer.born[1]:
            self.violations.append(
                f"{doing} {name} without waiting for lane {buffer.born[0]}, which took it from its allocator"
            )
        if buffer.size is not None and not writes and not _covered(buffer.past, span):
            self.violations.append(f"{doing} {part}, not all of which were written before")
        for past in buffer.past:
            apart = past.high <= span.low or span.high <= past.low
            if not apart and (writes or past.writes) and not past.before(clock):
                self.violations.append(f"{doing} {part} without waiting for {past.said()}")
        self.remember(buffer, _Past(entry.lane, clock[entry.lane], entry.what, span.low, span.high, writes), clock)

    def remember(self, buffer: _Buffer, new: _Past, clock: Clock) -> None:
        """Add an access, and forget those whose race with anything later would be a race of the new one too."""

        def implied(past: _Past) -> bool:
            inside = new.low <= past.low and past.high <= new.high
            return inside and past.before(clock) and (new.writes or (past.lane == new.lane and not past.writes))

        buffer.past = [past for past in buffer.past if not implied(past)]
        buffer.past.append(new)

    def release(self, entry: Release, clock: Clock) -> None:
        buffer = self.buffers.setdefault(entry.buffer, _Buffer())
        name = self.recording.names[entry.buffer]
        if buffer.released:
            self.violations.append(f"{entry.what} gives back {name}, which {buffer.released} gave back before")
        # Memory goes back to the lane that it was taken on, whichever is current when its last reference goes.
        home = entry.lane if buffer.born is None else buffer.born[0]
        known = clock if home == entry.lane else self.advance(home)
        for past in buffer.past:
            if not past.before(known):
                self.violations.append(
                    f"{entry.what} gives back {name} on lane {home} without waiting for {past.said()}"
                )
        buffer.released = entry.what


def check(recording: Recording) -> list[str]:
    """All races of a recorded run, each a sentence that names both operations and the buffer; none where order is
    proved."""
    return _Checker(recording).run()


def _join(clock: Clock, other: Clock) -> None:
    for lane, tick in other.items():
        if tick > clock.get(lane, 0):
            clock[lane] = tick


def _covered(past: Sequence[_Past], span: Span) -> bool:
    """Whether writes issued before, together, reach all of `span`."""
    reached = span.low
    for low, high in sorted((access.low, access.high) for access in past if access.writes):
        if low > reached:
            break
        reached = max(reached, high)
    return reached >= span.high
