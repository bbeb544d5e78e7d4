"""Finds modules that keep only a part of their parameters and gather the rest from other processes while they run."""

from __future__ import annotations

import sys
from functools import cache

from torch import nn

from .interception import Patches


def shards(module: nn.Module) -> bool:
    """Whether FSDP shards parameters at `module` (not at a module inside it)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not used unless imported
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def gathers(module: nn.Module) -> bool:
    """Whether `module`, or one inside it, has parameters that are spread over processes; equal in all processes."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return any(shards(m) for m in module.modules()) or (
        tensor is not None and any(isinstance(p, tensor.DTensor) for p in module.parameters())
    )


def tensor_parallel(root: nn.Module, model: nn.Module) -> bool:
    """Whether parameters of `model` are DTensors that FSDP, at `root` or inside, does not gather fully."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    sharded = {id(p) for m in (root, *model.modules()) if shards(m) for p in m.parameters()}
    return any(
        isinstance(p, tensor.DTensor) and (id(p) not in sharded or p.device_mesh.ndim > 1) for p in model.parameters()
    )


@cache
def collectives_waited_for() -> Patches:
    """Wait for functional collectives when they are issued. A replay may end before the first use of a result, which
    would otherwise wait, and its bytes would stay for good."""
    from torch.distributed import _functional_collectives as collectives

    return Patches((collectives, "_maybe_wrap_tensor", lambda _: collectives.wait_tensor))
