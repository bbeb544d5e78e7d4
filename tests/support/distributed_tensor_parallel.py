"""Run by `ranks`: a few steps of a model that `parallelize_module` has split, with and without rotoff; prints lines that
`test_distributed` reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from distributed_steps import whole, works
from ranks import say
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import rotoff

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = self.norm(x)  # with sequence parallelism a DTensor, which the model's code holds
        return x + self.down(nn.functional.silu(self.gate(here)) * self.up(here))


class Net(nn.Module):
    """No ``nn.Sequential``: stages are found."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SPLITS: dict[str, Callable[[], dict[str, object]]] = {
    "tensor": lambda: {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}


def model(split: str, mesh: DeviceMesh) -> Net:
    torch.manual_seed(0)
    made = Net()
    inner = mesh["tp"] if mesh.ndim > 1 else mesh
    for block in made.blocks:
        parallelize_module(block, inner, SPLITS[split]())
    if mesh.ndim > 1:
        for block in (*made.blocks, made.head):
            fully_shard(block, mesh=mesh["dp"])
    return made


def train(run: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(run.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for n in range(3):
        optimizer.zero_grad()
        loss = whole(run(x + n).square().mean())
        loss.backward()
        seen += [loss.detach(), *(whole(p.grad).clone() for p in run.parameters())]
        optimizer.step()
    return seen


def main(split: str, *modes: str) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if ranks > 2 else init_device_mesh("cpu", (2,))
    inner = mesh["tp"] if mesh.ndim > 1 else mesh
    x = torch.randn(4, 16 if split == "tensor" else 8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    if split == "tensor":
        dist.broadcast(x, group=inner.get_group(), group_src=0)
    expected = train(model(split, mesh), x)
    for mode in modes:
        planned = rotoff.Checkpointable(model(split, mesh), process_group=True, cache_directory=None).measure(x)
        limit = (planned.min_mem_limit(mode) + planned.keep_all_memory) // 2
        planned.compute_sequence(limit, mode=mode)
        got = train(planned, x)
        equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        plans: list[str | None] = [None] * ranks
        dist.all_gather_object(plans, f"{planned.sequence}\n{planned.mem_limit}")
        if dist.get_rank() == 0:
            same = len(set(plans)) == 1
            say(f"{mode}: equal={equal} same_plan={same} works={works(planned)} stages={len(planned.chain) > 3}")
        planned.close()
    whole_batch = x if split == "tensor" else torch.cat((x, x), 1)
    split_bytes, whole_bytes = saved_bytes(model(split, mesh), x), saved_bytes(Net(), whole_batch)
    if dist.get_rank() == 0:
        say(f"bytes of shards: {split_bytes < 0.6 * whole_bytes}")

    def returning() -> Net:
        made = model(split, mesh)
        made.head = parallelize_module(nn.Linear(WIDTH, 8), inner, ColwiseParallel(use_local_output=False))
        return made

    for what, make, group in (("alone", partial(model, split, mesh), None), ("sharded result", returning, True)):
        equal = as_without(make, x, group)
        if dist.get_rank() == 0:
            say(f"{what}: equal={equal}")


def saved_bytes(made: Net, x: torch.Tensor) -> int:
    """Of each block and the head, which are one stage each."""
    stages = [*made.blocks, made.head]
    measured = rotoff.Checkpointable(made, process_group=True, stages=stages, cache_directory=None).measure(x)
    return sum(stage.saved_bytes for stage in measured.chain.stages)


def as_without(make: Callable[[], Net], x: torch.Tensor, group: bool | None) -> bool:
    """Whether a model trains within a limit as it does without one. group: None: each process has a plan of its own."""
    torch.manual_seed(1)
    expected = train(make(), x)
    torch.manual_seed(1)
    planned = rotoff.Checkpointable(make(), process_group=group, cache_directory=None).measure(x)
    planned.compute_sequence((planned.min_mem_limit() + planned.keep_all_memory) // 2)
    equal = all(torch.equal(a, b) for a, b in zip(train(planned, x), expected, strict=True))
    planned.close()
    return equal
