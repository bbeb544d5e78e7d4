"""The link for the CPU: RAM is the device, a private file on a real disk is the host, one thread does the copies in
order.

The file is written from, and read into, the tensors' own memory, so an offload needs no second copy in RAM. The
kernel's page cache of the file is not the process's memory; the kernel frees it when others need it.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from ...errors import ExecutionError
from ...tensors.storage import memory_of
from .base import Link, Offset, Range, first_bytes
from .host_file import HostFile, check_directory, choose_directory


class FileTicket:
    """One copy of a `FileLink`; it holds its tensors until somebody waits. done: once it has ended."""

    __slots__ = ("_after", "began", "done", "ended", "failure", "offsets", "out", "process", "tensors")

    def __init__(
        self, tensors: Sequence[torch.Tensor], offset: Offset, out: bool, after: Sequence[FileTicket | None] = ()
    ) -> None:
        self.tensors = tuple(tensors)
        self._after = tuple(one for one in after if one is not None)
        self.offsets = first_bytes(tensors, offset)
        self.out = out
        self.done = _DONE
        self.failure: BaseException | None = None
        self.began = self.ended = 0.0  # on the host's clock
        self.process = os.getpid()
        for one in self._after:
            one.check_process()

    def run(self, file: HostFile) -> None:
        """Do the copy; an error is kept, and raised by `FileLink.wait`."""
        self.began = time.perf_counter()
        try:
            for one in self._after:
                if one.failure is not None:
                    raise one.failure
            self._move(file)
        except BaseException as error:
            self.failure = _without_frames(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._after = ()
            self.ended = time.perf_counter()

    def span(self, zero: float) -> tuple[float, float]:
        """Seconds from `zero`, a reading of ``time.perf_counter``, to the copy's begin and end."""
        return self.began - zero, self.ended - zero

    def join(self) -> None:
        """Block until the copy has ended; an interrupt gets through."""
        self.check_process()
        self.done.exception()  # none: `failure` has what it raised
        self.tensors = ()

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    def check_process(self) -> None:
        """Raise ExecutionError in a forked child, which has neither the thread nor the bytes of its parent's copies."""
        if self.process != os.getpid():
            raise ExecutionError(
                "this step moved values to the host before the process forked, and the child cannot fetch them; run"
                " its backward in the process that ran its forward, or the forward again"
            )

    def _move(self, file: HostFile) -> None:
        for tensor, offset in zip(self.tensors, self.offsets, strict=True):
            (file.write if self.out else file.read)(memory_of(tensor), offset)


AT_ONCE = 1 << 18  # bytes up to which a copy takes less time than waking a thread
_DONE = Future[None]()  # of copies that were made at once
_DONE.set_result(None)


class FileLink(Link):
    """Copies between RAM and a private file; the file and the thread exist from the first need of them until `close`.

    directory: where the file lies; by default the first of TMPDIR, /var/tmp, ~/.cache and the current directory that is
    writable and on a disk.

    Raises:
        rotoff.ExecutionError: for a directory that is in RAM, missing or not writable.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.device = torch.device("cpu")
        self.directory = choose_directory() if directory is None else check_directory(directory)
        self.capacity = 0
        self._worker: _Worker | None = None
        self._mapping: mmap.mmap | None = None

    def reserve(self, nbytes: int, whole: Sequence[Range] = ()) -> None:
        if nbytes <= self.capacity:
            return
        self._live_worker().file.reserve(nbytes)
        self.capacity = nbytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def stand_in(self, nbytes: int) -> torch.Tensor:
        """Pages of a private file: memory like any other, which the system takes back when others need it."""
        file = HostFile(self.directory)
        try:
            file.reserve(nbytes)
            return torch.frombuffer(file.mapped(), dtype=torch.uint8)  # keeps the mapping, as that the file
        except ExecutionError:  # the disk has no room
            return self.allocate(nbytes)
        finally:
            file.close()

    def host_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """Pages of the file, shared with it; they are no private memory, and stay when the link is closed."""
        if self._mapping is None or len(self._mapping) < offset + nbytes:
            self._mapping = self._live_worker().file.mapped()
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)

    def copy_out(self, sources: Sequence[torch.Tensor], offset: Offset) -> FileTicket:
        return self._submit(FileTicket(sources, offset, out=True))

    def copy_in(self, targets: Sequence[torch.Tensor], offset: Offset, *after: FileTicket | None) -> FileTicket:
        return self._submit(FileTicket(targets, offset, out=False, after=after))

    def wait(self, ticket: FileTicket) -> None:
        ticket.join()
        if ticket.failure is not None:
            raise ExecutionError(str(ticket.failure)) from ticket.failure

    def drain(self) -> None:
        if self._worker is not None and self._worker.process == os.getpid():
            self._worker.drain()

    def close(self) -> None:
        worker, self._worker, self.capacity, self._mapping = self._worker, None, 0, None
        if worker is not None:
            worker.close()

    def _submit(self, ticket: FileTicket) -> FileTicket:
        for one, first in zip(ticket.tensors, ticket.offsets, strict=True):
            end = first + one.nbytes
            if first < 0 or end > self.capacity:
                raise ExecutionError(f"a copy at host bytes {first} to {end} leaves the {self.capacity} bytes reserved")
        self._live_worker().submit(ticket)
        return ticket

    def _live_worker(self) -> _Worker:
        """This process's thread and file: a forked child lacks the thread, and must not write to its parent's file."""
        if self._worker is not None and self._worker.process != os.getpid():
            self._worker.close()
            self._worker = None
        if self._worker is None:
            self._worker = _Worker(self.directory, self.capacity)
        return self._worker


class _Worker:
    """The thread that copies, and its file; ended by `close`, with the link itself and at interpreter exit."""

    def __init__(self, directory: str | os.PathLike[str], nbytes: int) -> None:
        self.process = os.getpid()
        self.file = HostFile(check_directory(directory))
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="rotoff-file-link")  # no thread until the first copy
        self._last: Future[None] | None = None
        self._end = weakref.finalize(self, _end, self.process, self._copies, self.file)
        self.file.reserve(nbytes)

    def submit(self, ticket: FileTicket) -> None:
        """Queue a copy; run it at once if it takes less time than waking the thread, and none is before it."""
        if ticket.nbytes <= AT_ONCE and (self._last is None or self._last.done()):
            ticket.run(self.file)
            return
        try:
            if self._last is None:
                self._copies.submit(int)  # what cannot start a thread stays in the queue: this may
            self._last = ticket.done = self._copies.submit(ticket.run, self.file)
        except RuntimeError as error:
            raise ExecutionError(
                f"no thread for copies can be started ({error}); let the process have one more"
            ) from error

    def drain(self) -> None:
        if self._last is not None:
            self._copies.submit(int).result()  # the thread has let go of the last copy then

    def close(self) -> None:
        self._end()


def _without_frames(error: BaseException) -> BaseException:
    """Return `error` without its tracebacks, whose frames would keep the tensors alive as long as the error."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _end(process: int, copies: ThreadPoolExecutor, file: HostFile) -> None:
    if process == os.getpid():
        with suppress(RuntimeError):  # the collector may run this on the thread itself
            copies.shutdown()
    file.close()
