"""What a step takes on a CUDA device, by the caching allocator's own account."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Bytes above what there was before. asked: for. given: in the allocator's blocks. slack: what `given` may be more
    than the same step takes at another time: a block above 1 MiB is not split where at most 1 MiB would be left, and
    counts as a whole."""

    asked: int
    given: int
    slack: int


def step_peak(step: Callable[[], object]) -> Peak:
    """Of one `step`: workspaces, gradients and caches come with earlier ones."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    asked, given = (
        after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated")
    )
    return Peak(asked, given, after["allocation.large_pool.peak"] << 20)
