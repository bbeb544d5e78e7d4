"""Bytes that one step allocates beyond what was there before, by the allocator's own account."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch


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
