"""How many bytes are allocated now, by PyTorch on CUDA, by the whole process on a CPU."""

from __future__ import annotations

import ctypes
import time

import torch


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_SLOW = 1e-3  # seconds; glibc visits every free chunk, and a process may have a million of them
_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
if _mallinfo is not None:
    _mallinfo.restype = _MallInfo


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that are allocated now; always 0 where nobody counts them, or counting them takes long."""
    global _mallinfo
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if _mallinfo is None:
        return 0
    began = time.perf_counter()
    now = _mallinfo()
    if time.perf_counter() - began > _SLOW:
        _mallinfo = None
    return now.uordblks + now.hblkhd
