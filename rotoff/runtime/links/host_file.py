"""A private file on a real disk as host memory: where it may lie, reserving bytes in it, writing and reading at an
offset.

The file has no name once it is open, so nothing is left of it when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import ExecutionError
from ...io.files import named_directory

# a file there is RAM, which offloading is meant to free
IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MOUNTS = Path("/proc/self/mountinfo")
_CURE = 'give a directory on a disk with room, such as host_directory="/data/tmp", or ask for mode="remat"'


def filesystem_of(directory: str | os.PathLike[str]) -> str:
    """The type of the file system that holds `directory`, such as "ext4" or "tmpfs"; "" where the system does not
    say."""
    try:
        rows = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    path, best, kind = os.path.realpath(directory), "", ""
    for row in rows:
        words = row.split(" ")
        point = words[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two mounts at one point, the later row hides the earlier
            best, kind = point, words[words.index("-") + 1]
    return kind


def candidates() -> Iterator[Path]:
    """The directories to try where the user names none, best first."""
    if os.environ.get("TMPDIR"):
        yield Path(os.environ["TMPDIR"])
    yield Path("/var/tmp")
    yield Path.home() / ".cache"
    yield Path.cwd()


def check_directory(directory: str | os.PathLike[str]) -> Path:
    """`directory` as a path, once it is known to be a writable directory on a disk.

    Raises:
        rotoff.ExecutionError: where it is not.
    """
    path = named_directory(directory)
    if not path.is_dir():
        raise ExecutionError(
            f"the offload directory {path} {'is no directory' if path.exists() else 'does not exist'}; {_CURE}"
        )
    kind = filesystem_of(path)
    if kind in IN_RAM:
        raise ExecutionError(
            f"the offload directory {path} is in RAM ({kind}), where offloading frees nothing; {_CURE}"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ExecutionError(f"the offload directory {path} is not writable; {_CURE}")
    return path


def choose_directory() -> Path:
    """The first candidate that is a writable directory on a disk.

    Raises:
        rotoff.ExecutionError: where there is none.
    """
    refused = []
    for path in candidates():
        try:
            return check_directory(path)
        except ExecutionError:
            refused.append(str(path))
    raise ExecutionError(f"no writable directory on a disk for offloading among {', '.join(refused)}; {_CURE}")


# the mappings of files, each with its file's descriptor
_shared: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
_FIXED, _NORESERVE = 0x10, 0x4000  # of Linux, which the module mmap does not name


def _own_pages() -> None:
    """In a forked child: have its writes to mapped files copied, as those to any memory, or they reach the parent's."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype, call.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long],
    )
    for pages, descriptor in list(_shared.items()):
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        flags = mmap.MAP_PRIVATE | _FIXED | _NORESERVE
        if call(address, len(pages), mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "pages of the offload file are shared with the parent process")


os.register_at_fork(after_in_child=_own_pages)


class HostFile:
    """Bytes of a private file in `directory`, addressed by offset; safe to use from several threads at once.

    directory: where it lies. capacity: the bytes that `reserve` has secured so far.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.capacity = 0
        try:
            with tempfile.TemporaryFile(dir=directory) as file:  # with no name, and for this user alone
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise ExecutionError(
                f"no file for offloading can be made in {directory} ({error.strerror}); {_CURE}"
            ) from error

    def reserve(self, nbytes: int) -> None:
        """Secure `nbytes` bytes on the disk; what was written before stays.

        Raises:
            rotoff.ExecutionError: where the disk has no room for them; the file is then as it was.
        """
        if nbytes <= self.capacity:
            return
        more = nbytes - self.capacity
        try:
            free = _free_bytes(self.directory)
            if free is not None and more > free:  # asked for all the same, it would fill the disk for everybody first
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._descriptor, self.capacity, more)
        except OSError as error:
            os.ftruncate(self._descriptor, self.capacity)  # a failed fallocate may have taken a part
            raise self._failure("reserving", more, error) from error
        self.capacity = nbytes

    def mapped(self) -> mmap.mmap:
        """The bytes secured so far as memory; they stay for as long as that does, also once the file is closed.

        Raises:
            rotoff.ExecutionError: where the process may map no more memory.
        """
        try:
            pages = mmap.mmap(self._descriptor, self.capacity)
            descriptor = _shared[pages] = os.dup(self._descriptor)
        except OSError as error:
            raise self._failure("mapping", self.capacity, error) from error
        weakref.finalize(pages, os.close, descriptor)
        return pages

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` from byte `offset` of the file."""
        self._move(data, offset, os.pwrite, "writing", "no byte was written")

    def read(self, data: memoryview, offset: int) -> None:
        """Fill `data` with the bytes from byte `offset` of the file."""
        self._move(data, offset, lambda file, part, at: os.preadv(file, [part], at), "reading", "the file ends before")

    def _move(
        self, data: memoryview, offset: int, move: Callable[[int, memoryview, int], int], doing: str, end: str
    ) -> None:
        """Call `move` until it has moved all of `data`. end: the reason if a call moves nothing."""
        done = 0
        while done < len(data):  # a call may end short, on a signal or at the kernel's limit of 2 GiB
            try:
                count = move(self._descriptor, data[done:], offset + done)
            except OSError as error:
                raise self._failure(doing, len(data), error) from error
            if count == 0:
                raise self._failure(doing, len(data), OSError(errno.EIO, end))
            done += count

    def close(self) -> None:
        """Give the file back; closing twice is harmless."""
        descriptor, self._descriptor, self.capacity = self._descriptor, -1, 0
        if descriptor >= 0:
            os.close(descriptor)

    def _failure(self, doing: str, nbytes: int, error: OSError) -> ExecutionError:
        place = f"{doing} {nbytes} bytes in the offload directory {self.directory}"
        if error.errno not in _FULL:
            return ExecutionError(f"{place} failed ({error.strerror}); {_CURE}")
        free = _free_bytes(self.directory)
        room = "" if free is None else f", {free} bytes are free there"
        return ExecutionError(f"{place} failed ({error.strerror}): {nbytes} bytes are needed{room}; {_CURE}")


def _free_bytes(directory: Path) -> int | None:
    try:
        stat = os.statvfs(directory)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
