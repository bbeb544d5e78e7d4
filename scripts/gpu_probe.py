"""What the tests and benchmarks build on, asked of the machine in half a minute, one finding at a time:

    python3 scripts/gpu_probe.py OUT.json [--small]

(`--small`: in a hundredth of the bytes, to see whether it runs) memory of device and host before and after; what
pinning 1, 8 and 32 GiB takes; the link's bandwidth out, in, and both at once; the blocks that the allocator gives for
requests; one planned step that is checked after every operation. The file is written after each; what fails says why
there, and the exit code is 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rotoff
from rotoff.io.atomic_write import write_whole
from rotoff.profile.memory.allocator import record
from rotoff.tools.doctor import host_tier
from rotoff.tools.doctor.machine import memory_bytes

MIB, GIB = 1 << 20, 1 << 30
SMALL = "--small" in sys.argv
DEVICE = torch.device("cuda", 0)
REQUESTS = (1, 512, 513, 100_000, MIB - 1, MIB, MIB + 1, 3 * MIB)
REQUESTS += (10 * MIB - 512, 10 * MIB, 19 * MIB + 4096, 100 * MIB + 512)


def pinning(size: int) -> dict[str, Any]:
    """Of `size` GiB."""
    return host_tier.pinning(size * (MIB if SMALL else GIB), DEVICE)


def blocks() -> dict[str, Any]:
    """Bytes of the blocks that requests get: from an empty cache, and out of a large block that was given back."""
    found: dict[str, Any] = {}
    for history in ("empty cache", "after 500 MiB"):
        rows = {}
        for nbytes in REQUESTS:
            torch.cuda.empty_cache()
            if history != "empty cache":
                torch.empty(500 * MIB, dtype=torch.uint8, device=DEVICE)
            tensor, log = record(lambda n=nbytes: torch.empty(n, dtype=torch.uint8, device=DEVICE), DEVICE)  # type: ignore[misc]
            rows[str(nbytes)] = sum(event.size for event in log.events)
            del tensor
        found[history] = rows
    return found


def checked_step() -> dict[str, Any]:
    """Bytes of a planned step with moves and recompute, beside the expected ones."""
    torch.manual_seed(0)
    width = 64 if SMALL else 1024
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(4 * width, width, device=DEVICE)
    model(x).sum().backward()
    wrapped = rotoff.Checkpointable(model, check=True, cache_directory=None).measure(x)
    wrapped.compute_sequence(int(0.5 * wrapped.keep_all_memory))
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(DEVICE)
        before, start = torch.cuda.memory_allocated(DEVICE), time.perf_counter()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        wrapped(x).sum().backward()
        torch.cuda.synchronize(DEVICE)
        seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated(DEVICE) - before
    found = {
        "peak": peak,
        "expected_peak": wrapped.get_expected_memory(),
        "limit": wrapped.mem_limit,
        "seconds": seconds,
    }
    found |= {"expected_seconds": wrapped.get_expected_makespan(), "operations": " ".join(map(str, wrapped.sequence))}
    wrapped.close()
    return found


def main() -> int:
    out, found = Path(sys.argv[1]), dict[str, Any]()
    failed = 0
    asked: dict[str, Callable[[], Any]] = {
        "memory before": partial(memory_bytes, DEVICE),
        "checked step": checked_step,
        "blocks": blocks,
    }
    asked |= {
        "bandwidth": partial(host_tier.bandwidths, DEVICE, 4 * MIB if SMALL else 256 * MIB),
        **{f"pinning {size} GiB": partial(pinning, size) for size in (1, 8, 32)},
    }
    asked |= {"memory after": partial(memory_bytes, DEVICE)}
    for name, ask in asked.items():
        start = time.perf_counter()
        try:
            found[name] = ask()
        except Exception as error:
            failed, found[name] = 1, {"error": f"{type(error).__name__}: {error}"}
        print(f"{name} ({time.perf_counter() - start:.1f} s): {json.dumps(found[name])[:600]}", flush=True)
        write_whole(out, json.dumps(found, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
