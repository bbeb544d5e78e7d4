"""Bytes that one step allocates beyond what was there before, by the allocator's own account; and a malloc that keeps
what is freed.

On Linux glibc returns freed memory to the system and fetches it back in the next step, with a page fault for each 4
KiB. Plain PyTorch, which holds most, pays most for that: 5 to 10 % of a step. No operation of a plan costs it, so the
benchmarks let freed memory stay with the process."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

# of malloc.h: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, with values that keep all
MALLOPT = ((-1, 2**31 - 1), (-3, 2**30))


def keep_freed_memory() -> bool:
    """Have glibc's malloc hold on to what is freed; whether it could be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return [mallopt(*setting) for setting in MALLOPT] == [1, 1]


@dataclass(frozen=True)
class Peak:
    """allocated: bytes. reserved: bytes that the caching allocator took from the driver; None on the CPU."""

    allocated: int
    reserved: int | None


def peak_of(step: Callable[[], object], device: torch.device) -> Peak:
    """Run `step` once and say what it needed at most."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return Peak(
            torch.cuda.max_memory_allocated(device) - allocated, torch.cuda.max_memory_reserved(device) - reserved
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes two lines of its own
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return Peak(peak, None)
