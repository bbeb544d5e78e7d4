"""How many bytes are allocated now, by PyTorch on CUDA, by the whole process on a CPU."""

from __future__ import annotations

import ctypes

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


_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
if _mallinfo is not None:
    _mallinfo.restype = _MallInfo


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that are allocated now; 0 where nobody counts them."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if _mallinfo is None:
        return 0
    now = _mallinfo()
    return now.uordblks + now.hblkhd
