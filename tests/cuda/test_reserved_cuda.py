"""How many bytes of the device a planned step has the caching allocator reserve, above the limit: what docs/runtime.md
says."""

from __future__ import annotations

import gc
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import fresh

import rotoff

pytestmark = pytest.mark.cuda
MIB = 1 << 20
NAMES, MODES = ("mlp", "residual", "convolutional", "language"), ("joint", "remat", "offload")
CASES = [*itertools.product(NAMES, (1, 100), MODES), ("convolutional", 700, "joint")]
SHARE, MORE = 0.45, 22 * MIB  # of the limit, and beside that: a segment of 20 MiB, and one of 2 MiB for what is small


def test_the_docs_say_so() -> None:
    text = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
    assert re.search(rf"by up to {SHARE * 100:.0f} % of the limit and {MORE // MIB} MiB", " ".join(text.split()))


@pytest.mark.parametrize(("name", "times", "mode"), CASES)
def test_reserved_bytes_above_the_limit(name: str, times: int, mode: str, record_property: Any) -> None:
    module, batch = fresh(name)
    x = batch()
    x = x.repeat(times, *[1] * (x.dim() - 1)).cuda()

    def step(model: torch.nn.Module) -> None:
        model(x).float().square().mean().backward()

    step(module.cuda())  # gradients and workspaces are there
    model = rotoff.Checkpointable(module, cache_directory=None).measure(x, repeats=1)
    least, most = model.min_mem_limit(mode), model.keep_all_memory
    for share in (0, 0.5, 1):
        limit = int(least + share * (most - least))
        model.compute_sequence(limit, mode=mode)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step(model)
        torch.cuda.synchronize()
        over = torch.cuda.max_memory_reserved() - before - limit
        record_property(f"MiB reserved above {limit / MIB:.1f} at {share}", round(over / MIB, 1))
        assert over <= SHARE * limit + MORE, (limit, over)
    model.close()
