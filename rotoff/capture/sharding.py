"""Which modules keep only a part of their parameters, and gather the rest from other processes while they run."""

from __future__ import annotations

import sys

from torch import nn

from ..errors import MeasureError


def shards(module: nn.Module) -> bool:
    """Whether FSDP shards parameters at `module` (not at a module inside it)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has not imported it has not used it
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def gathers(module: nn.Module) -> bool:
    """Whether `module`, or one inside it, has parameters that lie on several processes; the same in all of them."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return any(shards(m) for m in module.modules()) or (
        tensor is not None and any(isinstance(p, tensor.DTensor) for p in module.parameters())
    )


def refuse_tensor_parallel(root: nn.Module, model: nn.Module) -> None:
    """Raise MeasureError where parameters of `model` are DTensors that FSDP, at `root` or inside, does not gather."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    sharded = {id(p) for m in (root, *model.modules()) if shards(m) for p in m.parameters()}
    for name, p in model.named_parameters():
        if isinstance(p, tensor.DTensor) and (id(p) not in sharded or p.device_mesh.ndim > 1):
            raise MeasureError(
                f"the parameter {name!r} is a DTensor of tensor parallelism, which rotoff cannot measure; plan a model"
                " without parallelize_module, or shard its stages by FSDP2"
            )
