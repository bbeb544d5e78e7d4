"""Which modules keep only a part of their parameters, and gather the rest from other processes while they run."""

from __future__ import annotations

import sys

from torch import nn


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
