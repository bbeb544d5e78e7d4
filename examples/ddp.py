"""Data-parallel training inside a memory limit, every process with the same plan.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --limit "20 MiB"
    torchrun --standalone --nproc-per-node 2 examples/ddp.py --limit "20 MiB" --shard  # FSDP2: parameters sharded too

With FSDP2 each stage is sharded by itself and the root is rotoff's module, so that measuring happens within the root's
first forward. ``process_group=True`` makes all processes follow one plan: the costliest measurement, the smallest
limit.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rotoff


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="20 MiB", help='bytes that a step may allocate, or "auto"')
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rows", type=int, default=512, help="of each process's batch")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same parameters in every process
    stages = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)]).to(device)
    if options.shard:
        for stage in stages:
            fully_shard(stage)
    planned = rotoff.Checkpointable(stages, process_group=True).compute_sequence(options.limit)
    model = fully_shard(planned) if options.shard else DistributedDataParallel(planned)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # other data in every process
    x = torch.randn(options.rows, options.width, device=device)
    for step in range(options.steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            if step == 1:  # the first one is measured
                peak, everything = planned.get_expected_memory(), planned.keep_all_memory
                print("peak", rotoff.format_bytes(peak), "of", rotoff.format_bytes(everything))
            print(f"step {step} loss {loss.item():.4f}")
    planned.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
