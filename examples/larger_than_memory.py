"""Training a model whose parameters, gradients and optimizer states do not fit: plain PyTorch fails, and rotoff trains
to the same losses.

    python examples/larger_than_memory.py
    python examples/larger_than_memory.py --blocks 24 --width 1024 --memory "1 GiB"

Three processes train the same steps from the same seed: plain PyTorch with all the memory that it wants; plain PyTorch
with `--memory` bytes for everything; rotoff with the same memory. The kernel enforces it (RLIMIT_DATA), from before the
model is made: whoever asks for more gets none. What rotoff keeps on the host lies in a file on a disk. 96 MiB of the
memory are left to what a process takes for itself: the profiler that measures, threads, the buffers of the matrix
library. Linux only.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time

import torch
from torch import nn

import rotoff

OTHERS = 96 * 2**20  # bytes of the memory for what is no tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def data_bytes(name: str = "VmData") -> int:
    """Private writable memory of this process, what RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def child(options: argparse.Namespace) -> None:
    """Train in one of the three ways; print the losses as JSON."""
    torch.set_num_threads(1)
    threading.stack_size(2**20)  # in place of 8 MiB for each thread, which would count
    small = nn.Linear(64, 64)
    small(torch.randn(64, 64)).sum().backward()
    torch.optim.AdamW(small.parameters()).step()  # threads and kernels are set up, and what optimizers need is imported
    memory = rotoff.parse_bytes(options.memory)
    if options.way != "free":
        limit = data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)])
    x, y = torch.randn(options.rows, options.width), torch.randn(options.rows, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = {}
    if options.way == "rotoff":
        model = rotoff.Checkpointable(model).measure(x, repeats=1)
        model.compute_sequence(device_limit=memory - OTHERS, optimizer=optimizer)
        told = {
            "peak": model.get_expected_memory(),
            "everything": model.keep_all_memory,
            "parameters": sum(p.nbytes for p in model.parameters()),
            "expected": model.get_expected_makespan(),
        }
    losses, seconds = [], []
    for _ in range(options.steps):
        began = time.perf_counter()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    print(json.dumps({"losses": losses, "seconds": sorted(seconds)[len(seconds) // 2], **told}))


def run(way: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # One arena, of which blocks of this size and more go back to the kernel when they are freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, *arguments, "--way", way]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=1024, help="of the batch")
    parser.add_argument("--memory", default="480 MiB", help="for everything")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--way", choices=["free", "plain", "rotoff"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        child(options)
        return
    ways = {"free": "plain, all memory", "plain": "plain, limited", "rotoff": "rotoff, limited"}
    found = {}
    for way, name in ways.items():
        done = run(way, sys.argv[1:])
        if done.returncode == 0:
            found[way] = json.loads(done.stdout.splitlines()[-1])
            losses = " ".join(f"{loss:.6f}" for loss in found[way]["losses"])
            print(f"{name:18} {found[way]['seconds']:6.2f} s a step   losses {losses}", flush=True)
        else:
            print(f"{name:18} fails: {done.stderr.strip().splitlines()[-1][:90]}", flush=True)
    if "rotoff" in found and "free" in found:
        told = found["rotoff"]
        print(
            f"parameters {told['parameters'] / 2**20:.0f} MiB; with gradients, states and the step"
            f" {told['everything'] / 2**20:.0f} MiB, in {rotoff.parse_bytes(options.memory) / 2**20:.0f} MiB; predicted"
            f" peak {told['peak'] / 2**20:.0f} MiB, step {told['expected']:.2f} s"
        )
        print("the losses are the same" if told["losses"] == found["free"]["losses"] else "the losses differ")


if __name__ == "__main__":
    main()
