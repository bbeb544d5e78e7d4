"""Collectives of FSDP2 for processes that share a device, or have a stand-in for one: by gloo, through the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.testing._internal.distributed import fake_pg  # noqa: F401  the backend that a mesh of such a device has


class Gather(DefaultAllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        whole = torch.empty_like(output_tensor, device="cpu")
        super().__call__(whole, input_tensor.cpu(), dist.group.WORLD)
        output_tensor.copy_(whole)


class Scatter(DefaultReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        part = torch.empty_like(output_tensor, device="cpu")
        super().__call__(part, input_tensor.cpu(), dist.group.WORLD, dist.ReduceOp.SUM)
        output_tensor.copy_(part / group.size() if op == dist.ReduceOp.AVG else part)
