"""What a device has free now, for ``mem_limit="auto"``."""

from __future__ import annotations

import torch

from ...errors import LimitError
from .pinned import available_bytes

MARGIN = 0.1  # of what is free, left to fragmentation and to what others allocate


def free_memory(device: torch.device) -> int:
    """Bytes that a step may allocate on `device`, less `MARGIN`.

    Raises:
        LimitError: where the system does not say.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached, and ours to use
    else:
        available = available_bytes()
        if available is None:
            raise LimitError(
                'mem_limit "auto" needs a system that says how much memory is free; give a number of bytes'
            )
        free = available
    return int(free * (1 - MARGIN))
