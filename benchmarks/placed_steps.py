"""Steps with parameters, gradients and optimizer states placed, beside the plain step with all memory.

    python -m benchmarks.placed_steps [--width 512] [--blocks 8] [--rows 1024] [--shares 0.5 0.25 0.15] [--rounds 9]
    [--updates after during] [--device cuda] [--dtype bfloat16] [--out FILE]

A share is of what everything takes: parameters, gradients, AdamW's states,
the batch and the plain step. Plain and placed steps run in turn. Each has its forward, backward and update; what counts
are medians. ``expected`` is the planned step's time, ``peak`` its predicted bytes. ``unlimited`` is what a step with
all memory would take by the same measurements: ``expected / unlimited`` can be compared with ``ratio`` on a machine
whose speed changes. ``moved`` are the bytes that go to the host and back in a step. ``load`` is what the machine's
processors had to do beside, as ``os.getloadavg`` says it before and after.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

# of the packages below; last, so that an installed rotoff goes first
sys.path.append(str(Path(__file__).parent.parent))
import rotoff
from benchmarks.grid.memory import keep_freed_memory
from benchmarks.grid.models import Block
from benchmarks.grid.run import machine

WARM = 2


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Seconds of a step with its update."""
    began = time.perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - began


def made(options: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    kind = getattr(torch, options.dtype)
    model = nn.Sequential(*[Block(options.width, max(1, options.width // 64), True) for _ in range(options.blocks)])
    x = torch.randn(max(1, options.rows // options.context), options.context, options.width)
    return model.to(kind), x.to(options.device, kind)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def row(options: argparse.Namespace, share: float, updates: str) -> dict[str, Any]:
    """Both ways, in `share` of everything."""
    model, x = made(options)
    plain = copy.deepcopy(model).to(x.device)
    placed = rotoff.Checkpointable(model, device=x.device).measure(x)
    optimizer = adamw(placed)
    asked: dict[str, Any] = {"optimizer": optimizer, "updates": updates, "refine": options.refine}
    placed.compute_sequence(device_limit="1 TiB", optimizer=optimizer)
    everything = placed.keep_all_memory
    limit = int(share * everything)
    placed.compute_sequence(device_limit=limit, **asked)
    ways = (plain, adamw(plain)), (placed, optimizer)
    seconds = [[step(one, own, x) for one, own in ways] for _ in range(WARM + options.rounds)][WARM:]
    times = [statistics.median(column) for column in zip(*seconds, strict=True)]
    parameters = zip(plain.parameters(), placed.parameters(), strict=True)
    moved = rotoff.simulate(placed.chain, placed.sequence, updates=updates)
    found = {
        "updates": updates,
        "limit": limit,
        "share": share,
        "everything": everything,
        "peak": placed.get_expected_memory(),
        "plain": times[0],
        "placed": times[1],
        "ratio": statistics.median(b / a for a, b in seconds),
        "expected": placed.get_expected_makespan(),
        "unlimited": placed.chain.compute_time + sum(group.update_time for group in placed.chain.parameters),
        "moved": moved.d2h_bytes + moved.h2d_bytes,
        "recomputed": moved.recompute_time,
        "same_bits": all(torch.equal(a.cpu(), b.cpu()) for a, b in parameters),
    }
    placed.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1024, help="of the batch, in sequences of the context")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.15])
    parser.add_argument("--updates", nargs="+", choices=["after", "during"], default=["after", "during"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--refine", type=float, default=1.0, help="seconds of search, about")
    parser.add_argument("--out", help="where to write the figures, as JSON")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    told = {"machine": machine(options.device), "options": vars(options), "load": [os.getloadavg()], "rows": rows}
    for updates, share in itertools.product(options.updates, options.shares):
        rows.append(found := row(options, share, updates))
        print(
            f"{updates:6} {share:4.0%} of {found['everything'] / 2**20:.0f} MiB: plain {found['plain']:.3f} s, placed"
            f" {found['placed']:.3f} s ({found['ratio']:.3f}), expected {found['expected']:.3f} s"
            f" ({found['expected'] / found['unlimited']:.3f}), moved {found['moved'] / 2**20:.0f} MiB"
            f"{'' if found['same_bits'] else ', OTHER BITS'}",
            flush=True,
        )
        if options.out:  # each as soon as it is there
            with open(options.out, "w", encoding="utf-8") as file:
                json.dump({**told, "load": [*told["load"], os.getloadavg()]}, file, indent=1)


if __name__ == "__main__":
    main()
