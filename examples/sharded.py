"""FSDP2 in a third of its memory: each process's shards, gradients, optimizer states and activations are three times
what it may allocate. Plain FSDP2 fails, and rotoff trains to the same numbers.

    torchrun --standalone --nproc-per-node 2 examples/sharded.py

The processes train the same steps from the same seed: FSDP2 with all the memory that it wants; FSDP2 with `--memory`
for everything; rotoff with the same memory. The kernel enforces it (RLIMIT_DATA), from before the model is made. What
rotoff keeps on the host lies in a file on a disk. 64 MiB of the memory are left to what a process takes for itself: the
profiler that measures, threads, the buffers of the matrix library. Linux only.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rotoff

OTHERS = 64 * 2**20  # bytes of the memory for what is no tensor
WAYS = {"free": "FSDP2, all memory", "plain": "FSDP2, limited", "rotoff": "rotoff, limited"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def sharded(width: int, blocks: int, limit: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose blocks are sharded as soon as they are made, and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[fully_shard(Block(width)) for _ in range(blocks)])
    if limit:
        model = rotoff.Checkpointable(model, process_group=True)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def data_bytes() -> int:
    """Private writable memory of this process, what RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def child(options: argparse.Namespace) -> None:
    """Train in one of the three ways; print what came of it as JSON."""
    torch.set_num_threads(1)
    store, rank = f"file://{options.store}-{options.way}", int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store, timedelta(minutes=2), world_size=size, rank=rank)
    step(*sharded(64, 2, False), *torch.randn(2, 64, 64))  # starts threads, and imports what optimizers need
    memory = rotoff.parse_bytes(options.memory)
    if options.way != "free":
        limit = data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model, optimizer = sharded(options.width, options.blocks, options.way == "rotoff")
    if isinstance(model, rotoff.Checkpointable):
        model.compute_sequence(device_limit=memory - OTHERS, optimizer=optimizer)
    torch.manual_seed(1 + rank)  # other data in every process
    x, y = torch.randn(options.rows, options.width), torch.randn(options.rows, options.width)
    losses, seconds = [], []
    for _ in range(options.steps):
        began = time.perf_counter()
        losses.append(step(model, optimizer, x, y))
        seconds.append(time.perf_counter() - began)
    shards = hashlib.sha256()
    for p in model.parameters():
        shards.update(p.to_local().detach().numpy().tobytes())
    told = {"losses": losses, "shards": shards.hexdigest(), "seconds": min(seconds)}
    if isinstance(model, rotoff.Checkpointable):
        told |= {"peak": model.get_expected_memory(), "everything": model.keep_all_memory}
        model.close()
    everyone = [None] * size
    dist.all_gather_object(everyone, told)
    print(json.dumps(everyone))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=256, help="of each process's batch")
    parser.add_argument("--memory", default="240 MiB", help="of each process, for everything")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        child(options)
        return
    first = os.environ["RANK"] == "0"
    store = Path(tempfile.gettempdir()) / f"sharded-{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}"
    # One arena, of which blocks of this size and more go back to the kernel when they are freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    found = {}
    for way, name in WAYS.items():
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--store", str(store)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0:
            found[way] = json.loads(done.stdout.splitlines()[-1])
            losses = " ".join(f"{loss:.6f}" for loss in found[way][0]["losses"])
            said = f"{found[way][0]['seconds']:6.2f} s a step   losses {losses}"
        else:
            said = f"fails: {done.stderr.strip().splitlines()[-1][:90]}"
        if first:
            print(f"{name:18} {said}", flush=True)
            Path(f"{store}-{way}").unlink(missing_ok=True)
    if first and "free" in found and "rotoff" in found:
        told = found["rotoff"][0]
        print(
            f"each process needs {told['everything'] / 2**20:.0f} MiB and may allocate"
            f" {rotoff.parse_bytes(options.memory) / 2**20:.0f} MiB; predicted peak {told['peak'] / 2**20:.0f} MiB"
        )
        same = all(
            one[what] == other[what]
            for one, other in zip(found["free"], found["rotoff"], strict=True)
            for what in ("losses", "shards")
        )
        print(f"losses and parameters are {'equal' if same else 'different'}")


if __name__ == "__main__":
    main()
