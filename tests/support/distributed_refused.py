"""Run by `ranks` in each of two processes: what a `device_limit` refuses there; prints lines that
`test_distributed_placed` reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distributed_failures import said
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rotoff


def blocks(shard: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[fully_shard(nn.Linear(8, 8)) if shard else nn.Linear(8, 8) for _ in range(4)])


def ask(planned: rotoff.Checkpointable, limit: int | str = "1 MiB", optimizer: bool = True) -> None:
    given = torch.optim.SGD(planned.parameters(), lr=0.1) if optimizer else None
    planned.compute_sequence(device_limit=limit, optimizer=given)


def whole() -> None:
    planned = rotoff.Checkpointable(blocks(False), process_group=True)
    DistributedDataParallel(planned)
    ask(planned)


def root_not_sharded() -> None:
    ask(rotoff.Checkpointable(blocks(True), process_group=True))


def without_group() -> None:
    ask(fully_shard(rotoff.Checkpointable(blocks(True))))


def in_one() -> None:
    planned = fully_shard(rotoff.Checkpointable(blocks(True), process_group=True))
    ask(planned, optimizer=dist.get_rank() == 0)


def too_small() -> None:
    planned = fully_shard(rotoff.Checkpointable(blocks(True), process_group=True))
    ask(planned, 1000 + dist.get_rank())
    planned(torch.ones(4, 8)).sum().backward()
    planned(torch.ones(4, 8))


REFUSED: tuple[Callable[[], None], ...] = whole, root_not_sharded, without_group, in_one, too_small


def main() -> None:
    for act in REFUSED:
        said(act.__name__, act)
