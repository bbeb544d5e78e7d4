"""Steps with parameters, gradients and optimizer states placed, beside the plain step with all memory, on the CPU.

    python -m benchmarks.placed_steps [--width 512] [--blocks 8] [--rows 1024] [--shares 0.5 0.25 0.15] [--rounds 9]
    [--out FILE]

A share is of what everything takes: parameters, gradients, AdamW's states, the batch and the plain step. Plain and
placed steps run in turn, each with its forward, backward and update; what counts are medians. ``expected`` is the
planned step's time, ``peak`` its predicted bytes; ``moved`` are the bytes that go to the host and back in a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(
    str(Path(__file__).parent.parent)
)  # of the packages below; last, so that an installed rotoff goes first
import rotoff
from benchmarks.grid.run import machine
from benchmarks.prediction import keep_freed_memory

WARM = 2


class Block(nn.Module):
    """A transformer's block: attention over rows of 128, and a wide middle."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Seconds of a whole step."""
    began = time.perf_counter()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def row(options: argparse.Namespace, share: float) -> dict[str, Any]:
    """Both ways in `share` of everything."""
    torch.manual_seed(0)
    plain: nn.Module = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)])
    placed = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None)
    x = torch.randn(max(1, options.rows // 128), 128, options.width)
    ways = [(model, torch.optim.AdamW(model.parameters(), lr=1e-4)) for model in (plain, placed)]
    placed.measure(x).compute_sequence(device_limit="1 TiB", optimizer=ways[1][1])
    everything = placed.keep_all_memory
    placed.compute_sequence(device_limit=int(share * everything), optimizer=ways[1][1], refine=options.refine)
    seconds = [[step(model, optimizer, x) for model, optimizer in ways] for _ in range(WARM + options.rounds)][WARM:]
    times = [statistics.median(column) for column in zip(*seconds, strict=True)]
    same = all(map(torch.equal, plain.parameters(), placed.parameters()))
    trace = rotoff.simulate(placed.chain, placed.sequence, updates="after")
    placed.close()
    return {
        "share": share,
        "everything": everything,
        "peak": placed.get_expected_memory(),
        "plain": times[0],
        "placed": times[1],
        "ratio": statistics.median(b / a for a, b in seconds),
        "expected": placed.get_expected_makespan(),
        "moved": trace.d2h_bytes + trace.h2d_bytes,
        "recomputed": trace.recompute_time,
        "same_bits": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1024, help="of the batch, in sequences of 128")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.15])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--refine", type=float, default=1.0, help="seconds of search, about")
    parser.add_argument("--out", help="where to write the figures, as JSON")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rows = []
    for share in options.shares:
        rows.append(found := row(options, share))
        print(
            f"{share:5.0%} of {found['everything'] / 2**20:.0f} MiB: plain {found['plain']:.3f} s, placed {found['placed']:.3f} s"
            f" ({found['ratio']:.3f}), expected {found['expected']:.3f} s, moved {found['moved'] / 2**20:.0f} MiB"
            f"{'' if found['same_bits'] else ', OTHER BITS'}",
            flush=True,
        )
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine("cpu"), "options": vars(options), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
