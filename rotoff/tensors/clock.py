"""Time on a device: the host's clock for the CPU, events on the current stream for an accelerator."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..accelerator import current_stream, is_accelerator, new_event


def mark(device: torch.device) -> Any:
    """Return a mark of the present moment; an accelerator reaches it after the kernels launched before it."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = new_event(device, timed=True)
    event.record(current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two marks that the device has reached."""
    return begin.elapsed_time(end) / 1e3 if hasattr(begin, "elapsed_time") else float(end - begin)
