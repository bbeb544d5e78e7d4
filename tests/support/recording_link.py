"""Links that record what they do for the check of `order`, and that let a missing wait do its worst, on any machine.

`RecordingLink` is the CUDA link's own code over streams that exist in name only: compute runs as the CPU always does,
and each copy runs as late as the recorded waits allow (or at a random moment before). Fresh memory, released memory and
new host memory are filled with garbage. So an order that is not enforced is seen twice: by `check`, and in wrong
numbers.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from order_checker import HOST, Clock, Recording, Span

import rotoff
from rotoff.runtime.links.base import Link, Range
from rotoff.runtime.links.cuda import CudaStreams, StreamLink
from rotoff.runtime.links.file import FileLink, FileTicket
from rotoff.runtime.links.host_file import HostFile
from rotoff.runtime.links.pool import LinkPool
from rotoff.tape.contents import Content
from rotoff.tape.operators import tensors_of
from rotoff.tape.tape import Known, Tape

_FRESH, _RELEASED = 0xA5, 0xDB  # two bytes that make absurd numbers in every dtype


class TouchingTape(Tape):
    """Tells a link of all that the model, what runs again and the backward read and write."""

    def __init__(self, known: Known, link: RecordingLink) -> None:
        super().__init__(known)
        self._link = link

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call(func, args, kwargs)
        self._touched(str(func), tensors_of(args, kwargs), tensors_of((out,), {}))
        return out

    def _run(self, number: int, have: dict[Content, torch.UntypedStorage], needed: set[Content]) -> None:
        op = self.operations[number]
        before, read = set(have), [have[content] for content in op.contents()]
        overwritten = [have[r.content] for r in op.references if r.into is not None and r.content not in needed]
        super()._run(number, have, needed)
        made = [have[content] for content in (*op.made, *op.written()) if content in have and content not in before]
        self._link.access(f"{op.operator} again", read, [*made, *overwritten])

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor = super().unpack(packed)
        self._touched("backward", [tensor], [])
        return tensor

    def _touched(self, what: str, read: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        reads, writes = ([t.untyped_storage() for t in some if self.plain(t)] for some in (read, made))
        self._link.access(what, reads, writes)


def moves_over(wrapped: rotoff.Checkpointable, link: RecordingLink) -> None:
    """Have `wrapped` move its values over `link`, and tell it of what else its steps do."""
    wrapped._steps.new_tape = lambda known: TouchingTape(known, link)

    def take(device: torch.device, nbytes: int) -> Link:
        link.reserve(nbytes)
        return link

    for part in vars(wrapped).values():
        if isinstance(part, LinkPool):
            part.take = take  # type: ignore[method-assign]
            part.give_back = lambda link: None  # type: ignore[method-assign]


class Lane:
    """A stream in name: the actions put on it, of which the first `done` have run."""

    def __init__(self, name: str, eager: bool) -> None:
        self.name = name
        self.eager = eager  # compute: its work has run when the host gets here
        self.issued = 0
        self.done = 0
        self._pending: deque[Callable[[], None]] = deque()

    def put(self, action: Callable[[], None]) -> None:
        if self.eager:
            action()
            return
        self._pending.append(action)
        self.issued += 1

    def run(self, position: int) -> None:
        """Run the first `position` actions ever put here, those that have not run yet."""
        while self.done < position:
            self.done += 1
            self._pending.popleft()()


class Mark:
    """An event: the place in a lane that it stands for, if any."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.position = 0
        self.mark: Clock = {}


class RecordingStreams(CudaStreams):
    """Streams over tensors on the CPU.

    recording: what was done so far. eagerness: the chance that a copy runs at each opportunity before it is forced to;
    0 is the latest moment that the waits allow. seed: of that chance.
    """

    def __init__(self, eagerness: float = 0.0, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.timed = False
        self.recording = Recording()
        self._eagerness = eagerness
        self._random = random.Random(seed)
        self._lanes: list[Lane] = []
        self._current = [Lane("compute", eager=True)]
        self._copies = 0

    @contextmanager
    def compute_on(self, lane: Lane) -> Iterator[None]:
        """Compute is on `lane` meanwhile, as within `torch.cuda.stream`."""
        self._current.append(lane)
        try:
            yield
        finally:
            self._current.pop()

    def current(self) -> Lane:
        return self._current[-1]

    def side(self) -> Lane:
        name = (
            ("device to host", "host to device")[len(self._lanes)]
            if len(self._lanes) < 2
            else f"side {len(self._lanes)}"
        )
        self._lanes.append(Lane(name, eager=False))
        return self._lanes[-1]

    def event(self) -> Mark:
        return Mark()

    def record(self, event: Mark, stream: Lane) -> None:
        event.lane, event.position, event.mark = stream, stream.issued, self.recording.record(stream.name)

    def wait(self, stream: Lane, event: Mark) -> None:
        if event.lane is None:
            return
        self.recording.wait(stream.name, event.mark)
        lane, position = event.lane, event.position
        stream.put(lambda: lane.run(position))
        self._perhaps_run()

    def finish(self, stream: Lane) -> None:
        self.recording.finish(stream.name)
        stream.run(stream.issued)

    def join(self, event: Mark) -> None:
        if event.lane is not None:
            self.recording.wait(HOST, event.mark)
            event.lane.run(event.position)

    def copy(self, stream: Lane, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            spans = [self.recording.span(source)], [self.recording.span(target)]
            self.recording.access(stream.name, f"copy {self._copies}", *spans)
            self._copies += 1
            stream.put(lambda target=target, source=source: target.copy_(source))  # type: ignore[misc]
        self._perhaps_run()

    def empty(self, nbytes: int) -> torch.Tensor:
        data = torch.full((nbytes,), _FRESH, dtype=torch.uint8)
        self.recording.allocate(self.current().name, self.recording.buffer(data.untyped_storage()), nbytes)
        return data

    def pin(self, nbytes: int, whole: Sequence[Range]) -> Sequence[RecordingSegment]:
        return [RecordingSegment(nbytes, self.recording)]

    def _perhaps_run(self) -> None:
        for lane in self._lanes:
            while lane.done < lane.issued and self._random.random() < self._eagerness:
                lane.run(lane.done + 1)


class RecordingSegment:
    """Host memory whose birth and end are recorded."""

    def __init__(self, nbytes: int, recording: Recording) -> None:
        self.tensor = torch.full((nbytes,), _FRESH, dtype=torch.uint8)
        self._recording = recording
        self._buffer = recording.buffer(self.tensor.untyped_storage(), "host memory")
        recording.allocate(HOST, self._buffer, nbytes)

    def close(self) -> None:
        self._recording.release(HOST, "close", self._buffer)


class RecordingLink(StreamLink):
    """The CUDA link over `RecordingStreams`.

    log: the run so far. eagerness, seed: see `RecordingStreams`. Memory that is given back is overwritten at once, as its
    next owner would.
    """

    def __init__(self, eagerness: float = 0.0, seed: int = 0) -> None:
        self.streams = RecordingStreams(eagerness, seed)
        self.log = self.streams.recording
        self._shown: dict[int, tuple[torch.Tensor, Span]] = {}  # by storage, host bytes that anybody may touch
        super().__init__(self.streams)

    def access(self, what: str, reads: Sequence[torch.UntypedStorage], writes: Sequence[torch.UntypedStorage]) -> None:
        lane = self.streams.current().name
        self.log.access(lane, what, [self.log.whole(s) for s in reads], [self.log.whole(s) for s in writes])

    def release(self, what: str, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage in storages:
            self.log.release(self.streams.current().name, what, self.log.buffer(storage))
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_RELEASED)

    def host_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        shown = super().host_bytes(offset, nbytes)
        (piece,) = self._slab.pieces(offset, nbytes)
        span = self.log.span(piece)
        self._shown[shown.untyped_storage()._cdata] = shown, span
        self.log.access(HOST, "host bytes are shown", [], [span])
        return shown

    def touched(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody changes tensors, the host those that lie over its bytes, and compute others."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._shown:
                span = self._shown[storage._cdata][1]
                self.log.access(HOST, what, [span], [span])
            else:
                span = self.log.span(tensor)
                self.log.access(self.streams.current().name, what, [], [span])

    def check(self) -> list[str]:
        """All races so far, a sentence each."""
        return list(self.log.races)


class LateFileLink(FileLink):
    """A file link whose copies begin `delay` seconds after their turn has come, none of them at once, and whose fresh
    memory holds garbage: a missing wait gives wrong numbers."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__()

        def run(ticket: FileTicket, file: HostFile) -> None:
            time.sleep(delay)
            FileTicket.run(ticket, file)

        self._late = type("LateTicket", (FileTicket,), {"__slots__": (), "nbytes": 1 << 30, "run": run})

    def allocate(self, nbytes: int) -> torch.Tensor:
        return super().allocate(nbytes).fill_(_FRESH)

    def _submit(self, ticket: FileTicket) -> FileTicket:
        ticket.__class__ = self._late
        return super()._submit(ticket)
