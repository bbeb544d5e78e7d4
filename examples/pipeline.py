"""A pipeline of two to four processes, each inside a memory limit of its own.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py --share 0.5
    torchrun --standalone --nproc-per-node 4 examples/pipeline.py --schedule Interleaved1F1B

Each process has its stages of a transformer. `rotoff.attach_schedule` reads from the schedule how many micro-batches
are in flight there, and plans recompute and offload so that all of them fit together. `--share` is of what the stages
take without a limit.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import rotoff

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--share", type=float, default=0.5, help="of the bytes of keeping everything")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4, help="of each stage")
    parser.add_argument("--rows", type=int, default=256, help="of each micro-batch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    chunks = 2 if options.schedule == "Interleaved1F1B" else 1
    numbers = range(rank, ranks * chunks, ranks)
    torch.manual_seed(rank)
    modules = [nn.Sequential(*[Block(options.width) for _ in range(options.blocks)]).to(device) for _ in numbers]
    stages = [PipelineStage(one, n, ranks * chunks, device) for one, n in zip(modules, numbers, strict=True)]
    schedule = SCHEDULES[options.schedule](
        stages if chunks > 1 else stages[0], n_microbatches=options.microbatches, loss_fn=nn.functional.mse_loss
    )

    planned = rotoff.attach_schedule(schedule, "1 PiB")  # measures in the first step, and keeps everything
    optimizer = torch.optim.AdamW([p for one in modules for p in one.parameters()], lr=1e-3)
    torch.manual_seed(0)
    x = torch.randn(options.microbatches * options.rows, options.width, device=device)

    def step() -> float:
        losses: list[torch.Tensor] = []
        last = {"target": x.flip(1), "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / options.microbatches

    step()
    everything = max(one.keep_all_memory for one in planned)
    for one in modules:
        rotoff.detach(one)
    planned = rotoff.attach_schedule(schedule, max(1, int(options.share * everything)))
    losses = [step() for _ in range(options.steps)]

    row = (
        f"rank {rank}: {planned[0].in_flight} in flight, keeping everything"
        f" {rotoff.format_bytes(everything)}, limit {rotoff.format_bytes(int(options.share * everything))}, peak"
        f" {rotoff.format_bytes(max(one.get_expected_memory() for one in planned))}, on the host"
        f" {rotoff.format_bytes(sum(one.get_expected_host_memory() for one in planned))}"
    )
    rows: list[str] = [""] * ranks
    dist.all_gather_object(rows, row)
    if rank == ranks - 1:
        print("\n".join(rows))
        print("losses " + " ".join(f"{loss:.4f}" for loss in losses))
    for one in planned:
        one.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
