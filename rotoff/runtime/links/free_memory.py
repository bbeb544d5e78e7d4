"""What a device has free now, for ``mem_limit="auto"``."""

from __future__ import annotations

import torch

from ...accelerator import free_bytes, is_accelerator, reservable_bytes
from ...errors import LimitError
from .pinned import available_bytes

MARGIN = 0.1  # of what a host has free, left to what others allocate


def free_memory(device: torch.device) -> int:
    """Bytes that a step may allocate on `device`, less a margin: on an accelerator, what its allocator may reserve
    beyond them; else `MARGIN`.

    Raises:
        LimitError: where the system does not say.
    """
    if is_accelerator(device):
        return reservable_bytes(free_bytes(device))
    available = available_bytes()
    if available is None:
        raise LimitError('mem_limit "auto" needs a system that says how much memory is free; give a number of bytes')
    return int(available * (1 - MARGIN))
