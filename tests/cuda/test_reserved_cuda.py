"""How many bytes of the device a planned step has the caching allocator hand out and reserve, above the limit: what
docs/runtime.md says, for both ways in which it takes memory of the device."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from models import ALL, Does, fresh, move_masks
from torch import nn

import rotoff
from rotoff import accelerator

pytestmark = pytest.mark.cuda
MIB = 1 << 20
MODES = ("joint", "remat", "offload")
EXPANDABLE = "expandable_segments:True" in accelerator.allocator_options()
CASES = [*itertools.product(ALL, (1, 100)), ("convolutional", 700)]
# Reserved above the limit: a share of it, and beside that two pieces of 20 MiB and 2 MiB, for what is large and small.
SHARES = {False: accelerator.OVER_RESERVED, True: accelerator.OVER_RESERVED_EXPANDABLE}
MORE = accelerator.OVER_RESERVED_BYTES
STUB = 512  # a number that stands for what is gone, once for a type of numbers, which stays


def on_the_device(batch: Any, times: int) -> Any:
    if isinstance(batch, tuple):
        return tuple(on_the_device(part, times) for part in batch)
    needed = batch.requires_grad
    return batch.detach().repeat(times, *[1] * (batch.dim() - 1)).cuda().requires_grad_(needed)


@pytest.mark.parametrize(("name", "times"), CASES)
@pytest.mark.grid(every=4)
def test_bytes_of_the_device_above_the_limit(name: str, times: int, record_property: Any) -> None:
    stages, batch = fresh(name)
    module = nn.Sequential(*stages, Does(lambda net, x: x.float().square().mean())).cuda()
    move_masks(module)
    x = on_the_device(batch(), times)

    def step(model: torch.nn.Module) -> None:
        model(x).backward()

    step(module)  # gradients and workspaces are there
    model = rotoff.Checkpointable(module).measure(x)
    most = model.keep_all_memory
    for mode, share in itertools.product(MODES, (0, 0.5, 1)):
        least = model.min_mem_limit(mode)
        limit = int(least + share * (most - least))
        model.compute_sequence(limit, mode=mode, refine=0.02)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step(model)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        given, over = (
            after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] - limit
            for kind in ("allocated", "reserved")
        )
        asked = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"] - limit
        at = f"{mode} at {limit / MIB:.1f} MiB"
        record_property(at, f"{over / MIB:.1f} MiB reserved above, {given} and {asked} bytes given and asked for")
        assert asked <= STUB, at
        assert given <= STUB + (0 if EXPANDABLE else after["allocation.large_pool.peak"] * MIB), at
        assert over <= SHARES[EXPANDABLE] * limit + MORE, at
    model.close()
