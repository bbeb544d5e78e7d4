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
from contextlib import suppress
from dataclasses import dataclass

import torch

from rotoff.accelerator import peaks
from rotoff.profile import allocations

# of malloc.h: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, with values that keep all
MALLOPT = ((-1, 2**31 - 1), (-3, 2**30))


def keep_freed_memory() -> None:
    """Have glibc's malloc hold on to what is freed, where there is one."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting in MALLOPT:
            mallopt(*setting)


@dataclass(frozen=True)
class Peak:
    """allocated: bytes. reserved: bytes that the caching allocator took from the driver; None on the CPU."""

    allocated: int
    reserved: int | None


def peak_of(step: Callable[[], object], device: torch.device) -> Peak:
    """Run `step` once and say what it needed at most."""
    gc.collect()
    if device.type == "cuda":
        found = peaks(device, step)
        return Peak(found["given"], found["reserved"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes two lines of its own
    return Peak(allocations.peak_of(allocations.logged(step, device)[1]), None)
