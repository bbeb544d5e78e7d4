"""How much memory the host gives, by taking it: the system of a virtual machine that grows as it is used says less.

    python3 scripts/host_room.py MOST

prints ROTOFF_HOST_MEMORY's value (such as "17.5 GiB") again and again, each larger, up to MOST GiB; the last line
counts. It takes a quarter of a GiB at a time, goes on while the system says that 1 GiB is still available or makes it
available within a second, for 20 seconds at most, and says 85 % of what it took, or of what the system says is
available where that is more. Where memory runs out all the same, the kernel ends this process and no other.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PIECE, LEAST = 1 << 28, 1 << 30
MADV_POPULATE_WRITE = 23  # Linux 5.14
SHARE = 0.85
GIB = 1 << 30


def available(path: Path = Path("/proc/meminfo")) -> int:
    """Bytes, as the system says; 0 where it does not."""
    with suppress(OSError, ValueError, StopIteration):
        rows = path.read_text(encoding="ascii").splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    return 0


def group_limit(paths: tuple[str, ...] = ("memory.max", "memory/memory.limit_in_bytes")) -> float:
    """What the control group may hold, in bytes; infinite where there is no limit."""
    for path in paths:
        with suppress(OSError, ValueError):
            return int((Path("/sys/fs/cgroup") / path).read_text())
    return float("inf")


def take(nbytes: int) -> mmap.mmap:
    """That many bytes, which are really there."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    try:
        pages.madvise(MADV_POPULATE_WRITE)
    except OSError:
        for start in range(0, nbytes, mmap.PAGESIZE):
            pages[start] = 1
    return pages


def rooms(most: float, seconds: float = 20.0) -> Iterator[int]:
    """Bytes that this host has room for at least, growing. most: bytes, beyond which nobody asks."""
    most = min(most, SHARE * group_limit())
    end, held = time.monotonic() + seconds, []
    best = 0
    while best < most and time.monotonic() < end:
        now = max(int(SHARE * max(len(held) * PIECE, available())), best)
        if now > best:
            best = int(min(now, most))
            yield best
        waited = time.monotonic() + 1.0
        while available() < LEAST:
            if time.monotonic() > waited:
                return
            time.sleep(0.05)
        held.append(take(PIECE))


def main() -> None:
    with suppress(OSError):  # if anybody must go, then this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    for room in rooms(float(sys.argv[1]) * GIB):
        print(f"{room / GIB:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
