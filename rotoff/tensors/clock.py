"""Time on a device: the host's clock for the CPU, events on the current stream for CUDA."""

from __future__ import annotations

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Return a mark of the present moment; on CUDA, the device reaches it after the kernels launched before it."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two marks that the device has reached."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def finish(device: torch.device) -> None:
    """Wait until the device has reached all marks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
