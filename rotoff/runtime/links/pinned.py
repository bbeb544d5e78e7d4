"""Pinned host memory of exact size: anonymous pages registered with CUDA, as one range of bytes that grows by segments.

PyTorch's own pinned allocator rounds a request up to a power of two and never gives it back; a plan knows its bytes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ...accelerator import free_bytes, is_accelerator, numa_node, register, reservable_bytes, unregister
from ...core.sizes import parse_bytes
from ...errors import ExecutionError, LimitError
from .base import Range

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap does not name
SEGMENT_BYTES = 1 << 30  # what is locked at once: a driver may refuse one range of tens of GiB that it takes in pieces
LEFT = 0.05  # of what a system says that it has, for what grows meanwhile: page tables, stacks, other processes
MARGIN = 0.1  # of what a host has free, left by a limit that is found to what others allocate
CGROUPS, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CURE = (
    'plan fewer host bytes with a larger mem_limit or with mode="remat", give the process more memory, or say in the'
    " environment that there is more (ROTOFF_HOST_MEMORY)"
)


class Slab:
    """One range of host bytes, addressed from 0, over the segments that were added to it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._segments: list[tuple[int, PinnedSegment]] = []

    def add(self, segment: PinnedSegment) -> None:
        """Lengthen the range by `segment`; what lies before it stays where it is."""
        self._segments.append((self.nbytes, segment))
        self.nbytes += segment.tensor.numel()

    def pieces(self, offset: int, nbytes: int) -> Iterator[torch.Tensor]:
        """The bytes from `offset` on as views, in order: one, or more where they lie across segments.

        Raises:
            rotoff.ExecutionError: where they are not all inside of the slab.
        """
        end = offset + nbytes
        if offset < 0 or end > self.nbytes:
            raise ExecutionError(f"a copy at host bytes {offset} to {end} leaves the {self.nbytes} bytes reserved")
        for start, segment in self._segments:
            low, high = max(offset - start, 0), min(end - start, segment.tensor.numel())
            if low < high:
                yield segment.tensor[low:high]

    def in_one_piece(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes from `offset` on as one tensor with a storage of its own, which keeps them.

        Raises:
            rotoff.ExecutionError: where they are not all inside of one segment.
        """
        piece, *others = self.pieces(offset, nbytes)
        if others:
            raise ExecutionError(f"host bytes {offset} to {offset + nbytes} lie in several pieces of memory")
        return torch.from_numpy(piece.numpy())

    def close(self) -> None:
        """Give all segments back; closing twice is harmless."""
        while self._segments:
            _, segment = self._segments.pop()
            self.nbytes -= segment.tensor.numel()
            segment.close()


# No torch operation may run when memory is released: a garbage collection may do it during a redo, which would count
# that operation as one of the stage's.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def pin(nbytes: int, device: torch.device, whole: Sequence[Range] = ()) -> list[PinnedSegment]:
    """`nbytes` bytes of page-locked memory, in segments of at most `SEGMENT_BYTES`, but for a range of `whole` that is
    larger: none of those lies in two. All segments or none.

    A copy may not cross from one registered range into the next, and where memory cannot be registered its segments lie
    apart.

    Raises:
        rotoff.ExecutionError: where the host cannot give or lock them.
    """
    _check_room(nbytes, f"{nbytes} bytes of pinned host memory are needed")
    segments: list[PinnedSegment] = []
    start = 0
    try:
        while start < nbytes:
            stop = min(start + SEGMENT_BYTES, nbytes)
            for first, size in whole:
                if first < stop < first + size:
                    stop = first if first > start else first + size
            segments.append(PinnedSegment(stop - start, device))
            start = stop
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    return segments


class PinnedSegment:
    """`nbytes` bytes of page-locked memory that `device` copies from and to at full speed and without the host's help.

    Raises:
        rotoff.ExecutionError: where the host cannot give or lock them.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._address = self._taken = 0
        _check_room(nbytes, f"{nbytes} bytes of pinned host memory are needed")
        pages = _mapped(nbytes)
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping, and the mapping goes with it
        _prefer(numa_node(device), self.tensor)
        try:
            pages.madvise(_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel does not know the advice; registering brings the pages
                raise _none(nbytes, error) from error
        if (code := register(self.tensor, device)) == 0:
            self._address = self.tensor.data_ptr()
            self._count(nbytes)
            return
        del self.tensor  # or the host would hold these bytes twice
        rounded = 1 << (nbytes - 1).bit_length()  # what PyTorch's allocator takes for them
        _check_room(
            rounded,
            f"{nbytes} bytes of host memory cannot be registered (CUDA error {code}), allocating them takes {rounded}",
        )
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            reason = f"registering them gives CUDA error {code}, allocating them {str(error).splitlines()[0]!r}"
            raise ExecutionError(f"{nbytes} bytes of host memory cannot be pinned: {reason}; {_CURE}") from error
        self._count(rounded)

    def _count(self, nbytes: int) -> None:
        global _pinned
        with _lock:
            _pinned += nbytes - self._taken
            self._taken = nbytes

    def close(self) -> None:
        """Unlock the memory and let it go; no copy may be under way."""
        address, self._address = self._address, 0
        if address:
            unregister(address, self._device)
        self.tensor = _NOTHING
        self._count(0)


_pinned = 0  # bytes, by all segments of this process
_lock = threading.RLock()  # a garbage collection amid a count may close another segment


def _check_room(nbytes: int, needed: str) -> None:
    """Locking more than there is invites the kernel to kill the process."""
    free = available_bytes()
    if free is not None and nbytes > free:
        raise ExecutionError(f"{needed} and {free} are available; {_CURE}")


def room_for_plan(device: torch.device) -> int | None:
    """Host bytes that a plan for `device` may use: what there is, with what this process has pinned already, shared
    among the processes of this host. None where the device's host tier is no memory of the host's, or the system does
    not say.
    """
    free = available_bytes() if is_accelerator(device) else None
    return None if free is None else free // local_processes() + _pinned


def local_processes() -> int:
    """How many processes of this training are on this host: the environment's LOCAL_WORLD_SIZE, which launchers set."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(processes) if processes.isdigit() else 1)


def available_bytes() -> int | None:
    """Host bytes that this process can still take without swapping or being killed; None where the system does not say.

    If the environment sets ROTOFF_HOST_MEMORY, such as "100 GiB", this is taken, less what this process has pinned: a
    virtual machine that grows as it is used reports less than it has.
    """
    if said := os.environ.get("ROTOFF_HOST_MEMORY"):
        return max(parse_bytes(said, "ROTOFF_HOST_MEMORY") - _pinned, 0)
    figures = [meminfo("MemAvailable"), *_cgroup_room()]
    known = [figure for figure in figures if figure is not None]
    return max(int(min(known) * (1 - LEFT)), 0) if known else None


def free_memory(device: torch.device) -> int:
    """Bytes that a step may allocate on `device` now, less a margin: on an accelerator, what its allocator may reserve
    beyond them; else `MARGIN`.

    Raises:
        LimitError: where the system does not say.
    """
    if is_accelerator(device):
        return reservable_bytes(free_bytes(device))
    if (available := available_bytes()) is None:
        raise LimitError('mem_limit "auto" needs a system that says how much memory is free; give a number of bytes')
    return int(available * (1 - MARGIN))


def _mapped(nbytes: int) -> mmap.mmap:
    """Anonymous memory, of which no page is there yet.

    Raises:
        rotoff.ExecutionError: where the process may map no more.
    """
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise _none(nbytes, error) from error
    # A forked child (a data loader's worker) must neither see these pages nor make the parent copy a locked one on
    # write.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without the one shares a little more, without the other locks slower
                pages.madvise(getattr(mmap, advice))
    return pages


def _none(nbytes: int, error: Exception) -> ExecutionError:
    return ExecutionError(f"the host cannot give {nbytes} bytes of memory ({error}); {_CURE}")


_MBIND = {"x86_64": 237, "aarch64": 235}  # its number as a system call, which the C library does not export
_PREFERRED = 1  # MPOL_PREFERRED: other nodes are used where this one has no room


def _prefer(node: int | None, host: torch.Tensor) -> None:
    """Have the pages of `host`, of which none is there yet, on a node of the host's memory, if possible."""
    call = _MBIND.get(platform.machine())
    if node is not None and call is not None:
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        nodes = ctypes.c_ulong(64 * len(mask) + 1)  # the kernel takes one less
        ctypes.CDLL(None).syscall(
            call, ctypes.c_void_p(host.data_ptr()), ctypes.c_ulong(host.numel()), _PREFERRED, mask, nodes, 0
        )


def meminfo(name: str) -> int | None:
    """Bytes that the system reports under this name; None if it does not."""
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _cgroup_room() -> Iterator[int | None]:
    """What the process's control group and those around it have left, by version 2's files or version 1's; their page
    cache counts as free. A job of a cluster has a group of its own within that of the machine or the container."""
    try:
        rows = [row.split(":", 2) for row in CGROUPS.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return
    for _, controllers, path in rows:
        if controllers and "memory" not in controllers.split(","):
            continue
        top = CGROUP_ROOT / "memory" if controllers else CGROUP_ROOT
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        own = top / path.lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
            yield _left_in(folder, *names)


def _left_in(folder: Path, limit: str, used: str) -> int | None:
    try:
        total, now = int((folder / limit).read_text()), int((folder / used).read_text())
        rows = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such group, or "max"
        return None
    stat = {words[0]: int(words[1]) for words in map(str.split, rows) if len(words) == 2 and words[1].isdigit()}
    cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))
    return total - now + cache
