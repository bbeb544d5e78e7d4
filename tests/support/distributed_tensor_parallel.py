"""Run by `ranks`: a few steps of a model that `parallelize_module` has split, with and without rotoff; prints lines that
`test_distributed` reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_steps import whole
from models import Does
from ranks import by_first, everyone
from step_by_step import works
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


def gated(net: Any, x: torch.Tensor) -> torch.Tensor:
    here = net.norm(x)  # with sequence parallelism a DTensor, which the model's code holds
    return x + net.down(nn.functional.silu(net.gate(here)) * net.up(here))


def block() -> nn.Module:
    parts = {"norm": nn.LayerNorm(WIDTH), "gate": nn.Linear(WIDTH, 4 * WIDTH), "up": nn.Linear(WIDTH, 4 * WIDTH)}
    return Does(gated, **parts, down=nn.Linear(4 * WIDTH, WIDTH))


def in_turn(net: Any, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        x = block(x)
    return net.head(x)


def whole_net() -> Any:
    """No ``nn.Sequential``: stages are found."""
    torch.manual_seed(0)
    return Does(in_turn, blocks=nn.ModuleList(block() for _ in range(6)), head=nn.Linear(WIDTH, 8))


SPLITS: dict[str, Callable[[], dict[str, object]]] = {
    "tensor": lambda: {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}


def model(split: str, mesh: DeviceMesh) -> Any:
    made = whole_net()
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


def compared(
    make: Callable[[], nn.Module], x: torch.Tensor, mode: str, group: bool | None = True
) -> tuple[bool, rotoff.Checkpointable]:
    """Whether a model trains within a limit as it does without one, and what planned it. group: None: each process has a
    plan of its own."""
    expected = train(make(), x)
    planned = rotoff.Checkpointable(make(), process_group=group).measure(x)
    planned.compute_sequence((planned.min_mem_limit(mode) + planned.keep_all_memory) // 2, mode=mode)
    equal = all(torch.equal(a, b) for a, b in zip(train(planned, x), expected, strict=True))
    return equal, planned


def main(split: str, *modes: str) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if ranks > 2 else init_device_mesh("cpu", (2,))
    inner = mesh["tp"] if mesh.ndim > 1 else mesh
    x = torch.randn(4, 16 if split == "tensor" else 8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    if split == "tensor":
        dist.broadcast(x, group=inner.get_group(), group_src=0)
    for mode in modes:
        equal, planned = compared(partial(model, split, mesh), x, mode)
        same = len(set(everyone(f"{planned.sequence}\n{planned.mem_limit}"))) == 1
        by_first(
            f"{mode}: equal={equal} same_plan={same} works={works(planned.sequence)} stages={len(planned.chain) > 3}"
        )
        planned.close()
    whole_batch = x if split == "tensor" else torch.cat((x, x), 1)
    split_bytes, whole_bytes = saved_bytes(model(split, mesh), x), saved_bytes(whole_net(), whole_batch)
    by_first(f"bytes of shards: {split_bytes < 0.6 * whole_bytes}")

    def returning() -> nn.Module:
        made = model(split, mesh)
        made.head = parallelize_module(nn.Linear(WIDTH, 8), inner, ColwiseParallel(use_local_output=False))
        return made

    for what, make, group in (("alone", partial(model, split, mesh), None), ("sharded result", returning, True)):
        equal, planned = compared(make, x, "joint", group)
        planned.close()
        by_first(f"{what}: equal={equal}")


def saved_bytes(made: Any, x: torch.Tensor) -> int:
    """Of each block and the head, which are one stage each."""
    stages = [*made.blocks, made.head]
    measured = rotoff.Checkpointable(made, process_group=True, stages=stages).measure(x)
    return sum(stage.saved_bytes for stage in measured.chain.stages)
