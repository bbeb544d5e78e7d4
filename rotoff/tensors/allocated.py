"""How many bytes are allocated now, by PyTorch on an accelerator, by the whole process on a CPU."""

from __future__ import annotations

import ctypes
import time

import torch

from .. import accelerator


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
_took = 0.0  # seconds of the last call, less for each time that none was made since it took too long
_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
if _mallinfo is not None:
    _mallinfo.restype = _MallInfo


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes that are allocated now; None where nobody counts them, or counting them takes too long."""
    global _took
    if accelerator.is_accelerator(device):
        return accelerator.allocated_bytes(device)
    if _mallinfo is None:
        return None
    if _took > _SLOW:
        _took *= 0.99
        return None
    began = time.thread_time()
    now = _mallinfo()
    _took = time.thread_time() - began
    return now.uordblks + now.hblkhd
