"""The link for an accelerator: a side stream for each direction, pinned host memory of exact size, events for order.

For each copy, an event is recorded on the compute stream at issue and the copy's stream waits for it, because until
then the source is not written, or the target still in use. A copy back also waits for the copy out that filled its host
bytes. `wait` makes the compute stream wait for the copy's own event. After that, memory may go back to the allocator,
which reuses it in the order of the compute stream. So the allocator needs no `record_stream`, which would return blocks
late, and the host never waits within a step.

`CudaStreams` is all that a `StreamLink` asks of a device. The tests put another in its place, for tensors on the CPU,
so that they check the order of the code that runs.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence

import torch

from ...accelerator import Event, Stream, copy_on, current_stream, indexed, named, new_event, new_stream
from .base import Link, Offset, Range, first_bytes
from .pinned import PinnedSegment, Slab, pin


class CudaStreams:
    """Queues of work of an accelerator, each of which runs in order, and events that order queues.

    timed: whether new events can tell when they passed.
    """

    timed = False

    def __init__(self, device: torch.device | str | int) -> None:
        self.device = indexed(named(device))

    def current(self) -> Stream:
        """The stream on which compute, and so the allocator, is ordered right now on the calling thread. It is asked
        anew each time: a backward runs on another thread, and the user may be on a stream of their own."""
        return current_stream(self.device)

    def side(self) -> Stream:
        """A new stream beside the compute stream. torch hands its 32 streams of a priority out in turn; users take
        theirs from the other priority, so that a copy does not end up in the queue of a user's compute."""
        return new_stream(self.device, priority=-1)

    def event(self) -> Event:
        """A new event; one that was never recorded holds nobody up."""
        return new_event(self.device, self.timed)

    def record(self, event: Event, stream: Stream) -> None:
        """Let `event` mark all work queued on `stream` so far; earlier waits for it keep their old meaning."""
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Order all work queued on `stream` from now on after what `event` marks now; the host goes on."""
        stream.wait_event(event)

    def finish(self, stream: Stream) -> None:
        """Block the host until `stream` is empty."""
        stream.synchronize()

    def join(self, event: Event) -> None:
        """Block the host until the work that `event` marks has ended."""
        event.synchronize()

    def copy(self, stream: Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put a copy on `stream` for each (target, source)."""
        copy_on(stream, self.device, pairs)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate `nbytes` uninitialised bytes of the device, from the allocator of the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pin(self, nbytes: int, whole: Sequence[Range]) -> Sequence[PinnedSegment]:
        """Return `nbytes` bytes of pinned host memory, in one piece or more, each of the ranges `whole` in one."""
        return pin(nbytes, self.device, whole)


class StreamTicket:
    """One copy that a `StreamLink` has started; it holds the tensors until somebody waits.

    A ticket that is destroyed without a wait (by an aborted step) makes the compute stream wait before it releases the
    tensors: a copy must never write to memory that the allocator has given to another tensor.
    """

    __slots__ = ("_pool", "_streams", "_tensors", "begin", "compute", "done")

    def __init__(
        self, streams: CudaStreams, pool: list[Event], compute: Stream, done: Event, tensors: Sequence[torch.Tensor]
    ):
        self._streams = streams
        self._pool = pool
        self._tensors: tuple[torch.Tensor, ...] | None = tuple(tensors)
        self.compute = compute
        self.done = done
        self.begin: Event | None = None  # where the link is timed

    def span(self, zero: Event) -> tuple[float, float]:
        """Seconds from `zero`, a timed event of the compute stream, to the copy's begin and end; both must have
        passed."""
        assert self.begin is not None
        return zero.elapsed_time(self.begin) / 1e3, zero.elapsed_time(self.done) / 1e3

    def settle(self) -> None:
        """Release the tensors, because the compute stream waits for the copy."""
        self._tensors = None

    def __del__(self) -> None:
        try:
            if self._tensors is not None:
                self._streams.wait(self.compute, self.done)
        except Exception:
            return  # the device is gone, or the process is ending
        self._pool.append(self.done)


class StreamLink(Link):
    """Copies between a device with streams and a slab of its host memory; both directions at once."""

    queues = True

    def __init__(self, streams: CudaStreams) -> None:
        self.device = streams.device
        self.capacity = 0
        self._streams = streams
        self._slab = Slab()
        self._outward = streams.side()
        self._inward = streams.side()
        self._pool: list[Event] = []  # events that may be used again
        self._end = weakref.finalize(self, _end, os.getpid(), streams, (self._outward, self._inward), self._slab)

    def reserve(self, nbytes: int, whole: Sequence[Range] = ()) -> None:
        if (had := self.capacity) < nbytes:
            for segment in self._streams.pin(nbytes - had, [(first - had, size) for first, size in whole]):
                self._slab.add(segment)
            self.capacity = self._slab.nbytes

    def begin(self) -> None:
        read = self._event()
        self._streams.record(read, self._inward)
        self._streams.wait(self._outward, read)
        self._pool.append(read)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._streams.empty(nbytes)

    def copy_out(self, sources: Sequence[torch.Tensor], offset: Offset) -> StreamTicket:
        return self._start(self._outward, self._places(sources, offset), sources, ())

    def copy_in(self, targets: Sequence[torch.Tensor], offset: Offset, *after: StreamTicket | None) -> StreamTicket:
        pairs = [(device, host) for host, device in self._places(targets, offset)]
        return self._start(self._inward, pairs, targets, after)

    def wait(self, ticket: StreamTicket) -> None:
        compute = self._streams.current()
        self._streams.wait(compute, ticket.done)
        if compute != ticket.compute:  # the tensors' memory goes back to the allocator of the stream of their issue
            self._streams.wait(ticket.compute, ticket.done)
        ticket.settle()

    def join(self, ticket: StreamTicket) -> None:
        self._streams.join(ticket.done)

    def host_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._slab.in_one_piece(offset, nbytes)

    def drain(self) -> None:
        for stream in (self._outward, self._inward):
            self._streams.finish(stream)

    def close(self) -> None:
        self.drain()
        self._slab.close()
        self.capacity = 0

    def _places(self, tensors: Sequence[torch.Tensor], offset: Offset) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(host bytes, device bytes) for `tensors`."""
        places = []
        for tensor, first in zip(tensors, first_bytes(tensors, offset), strict=True):
            start = 0
            for host in self._slab.pieces(first, tensor.numel()):
                stop = start + host.numel()
                places.append((host, tensor if host.numel() == tensor.numel() else tensor[start:stop]))
                start = stop
        return places

    def _start(
        self,
        stream: Stream,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        after: Sequence[StreamTicket | None],
    ) -> StreamTicket:
        streams = self._streams
        compute = streams.current()
        ready = self._event()
        streams.record(ready, compute)
        streams.wait(stream, ready)
        self._pool.append(ready)  # the wait above keeps the event's meaning of that time
        for one in after:
            if one is not None:
                streams.wait(stream, one.done)
        streams.timed = self.timed
        begin = streams.event() if self.timed else None
        if begin is not None:
            streams.record(begin, stream)
        ticket = StreamTicket(streams, self._pool, compute, self._event(), tensors)
        try:
            streams.copy(stream, pairs)
        finally:
            streams.record(ticket.done, stream)  # after a failure too: some of the copies may be under way
        ticket.begin = begin
        return ticket

    def _event(self) -> Event:
        # A timed link uses no event twice, because their times are read later.
        try:
            return self._streams.event() if self.timed else self._pool.pop()
        except IndexError:
            return self._streams.event()


def _end(process: int, streams: CudaStreams, sides: tuple[Stream, Stream], slab: Slab) -> None:
    """Close a link that nobody closed: locked pages must be unlocked before they are unmapped."""
    if slab.nbytes and process == os.getpid():  # a forked child has neither the pages nor CUDA
        for side in sides:
            streams.finish(side)
        slab.close()
