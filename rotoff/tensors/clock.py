"""Time as a device sees it: the host's clock on the CPU; on CUDA events on the stream that computes at the moment."""

from __future__ import annotations

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """This moment on the device's own time line: launches run ahead of it, as they do in training."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """From a mark to a later one, once the device has come to both."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def finish(device: torch.device) -> None:
    """Wait until the device has come to all marks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
