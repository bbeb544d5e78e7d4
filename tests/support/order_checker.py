"""Proof of order: every copy, event and use of memory of a run, and the check that nothing races.

A lane is what runs in order by itself: the compute stream, a copy stream, the thread of a file link, the host program
that issues everything. Lane A's work happens before lane B's only where an event recorded on A is waited for on B
(Lamport's happens-before; each lane has a vector clock, as in race detectors such as FastTrack). What was issued after
the host itself had waited comes after what it waited for. The order in which operations were issued, or happened to
run, proves nothing.

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
Clock = dict[str, int]  # of each lane, how much of its work is known to have happened
_weak: Any = reductions.StorageWeakRef  # not typed


class Span(NamedTuple):
    """Bytes `low` to `high` (exclusive) of a buffer."""

    buffer: int
    low: int
    high: int


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


@dataclass
class _Buffer:
    """What is known of one buffer."""

    name: str
    past: list[_Past] = field(default_factory=list)
    born: tuple[str, int] | None = None
    size: int | None = None  # known where the birth is, and then every read needs a write before it
    released: str = ""


class Recording:
    """Checks what a run does, told in the order in which the host issues it.

    races: all so far, each a sentence that names both operations and the buffer; none where order is proved. accesses:
    what has read or written.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.accesses: list[str] = []
        self._clocks: dict[str, Clock] = {}
        self._buffers: list[_Buffer] = []
        self._storages: dict[int, tuple[Any, int]] = {}

    # Buffers

    def new_buffer(self, name: str) -> int:
        """A number for a buffer that is called `name`."""
        self._buffers.append(_Buffer(name))
        return len(self._buffers) - 1

    def buffer(self, storage: torch.UntypedStorage, name: str = "storage") -> int:
        """The number of the buffer that `storage` is; held weakly, and never confused with a later one at its
        address."""
        key = storage._cdata
        if key not in self._storages:
            number = self.new_buffer(f"{name} {len(self._storages)} ({storage.nbytes()} bytes)")
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

    # What lanes do

    def record(self, lane: str) -> Clock:
        """A point of the work of `lane`."""
        return dict(self._advance(lane))

    def wait(self, lane: str, mark: Clock) -> None:
        """What `lane` does from now on comes after the marked point."""
        _join(self._advance(lane), mark)

    def finish(self, lane: str) -> None:
        """The host waits until `lane` is empty."""
        _join(self._advance(HOST), self._clocks.get(lane, {}))

    def access(self, lane: str, what: str, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """`lane` reads and writes bytes."""
        self.accesses.append(what)
        clock = self._advance(lane)
        for writing, spans in ((False, reads), (True, writes)):
            for span in spans:
                if span.low < span.high:
                    self._touch(lane, what, span, clock, writing)

    def allocate(self, lane: str, buffer: int, nbytes: int) -> None:
        """`lane` takes a buffer of `nbytes` bytes from its allocator."""
        self._buffers[buffer].born, self._buffers[buffer].size = (lane, self._advance(lane)[lane]), nbytes

    def release(self, lane: str, what: str, number: int) -> None:
        """`lane` gives a buffer back to its allocator."""
        clock, buffer = self._advance(lane), self._buffers[number]
        if buffer.released:
            self.races.append(f"{what} gives back {buffer.name}, which {buffer.released} gave back before")
        # Memory goes back to the lane that it was taken on, whichever is current when its last reference goes.
        home = lane if buffer.born is None else buffer.born[0]
        known = clock if home == lane else self._advance(home)
        for past in buffer.past:
            if not past.before(known):
                self.races.append(f"{what} gives back {buffer.name} on lane {home} without waiting for {past.said()}")
        buffer.released = what

    def _advance(self, lane: str) -> Clock:
        """The clock of `lane` at its next operation, which comes after all that the host had waited for at its
        issue."""
        clock = self._clocks.setdefault(lane, {})
        _join(clock, self._clocks.get(HOST, {}))
        clock[lane] = clock.get(lane, 0) + 1
        return clock

    def _touch(self, lane: str, what: str, span: Span, clock: Clock, writes: bool) -> None:
        buffer = self._buffers[span.buffer]
        doing = f"{what} on lane {lane} {'writes' if writes else 'reads'}"
        part = f"bytes {span.low} to {span.high} of {buffer.name}"
        if buffer.released:
            self.races.append(f"{doing} {buffer.name}, which {buffer.released} gave back before")
        if buffer.born is not None and clock.get(buffer.born[0], 0) < buffer.born[1]:
            self.races.append(
                f"{doing} {buffer.name} without waiting for lane {buffer.born[0]}, which took it from its allocator"
            )
        if buffer.size is not None and not writes and not _covered(buffer.past, span):
            self.races.append(f"{doing} {part}, not all of which were written before")
        for past in buffer.past:
            apart = past.high <= span.low or span.high <= past.low
            if not apart and (writes or past.writes) and not past.before(clock):
                self.races.append(f"{doing} {part} without waiting for {past.said()}")
        new = _Past(lane, clock[lane], what, span.low, span.high, writes)

        def implied(past: _Past) -> bool:
            """Whether its race with anything later would be a race of the new one, too."""
            inside = new.low <= past.low and past.high <= new.high
            return inside and past.before(clock) and (new.writes or (past.lane == new.lane and not past.writes))

        buffer.past = [*(past for past in buffer.past if not implied(past)), new]


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
