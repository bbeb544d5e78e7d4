"""How a step is run: plain PyTorch, the peers, rotoff. Each method turns a model into something called like it.

Names, as cells give them:

* ``plain``; ``plain-again``: the same, beside another one, to show what the measurement itself is worth
* ``checkpoint``: `torch.utils.checkpoint` around each block
* ``checkpoint_sequential``: PyTorch's segments, with the count that needs the fewest bytes
* ``selective``: each block under selective checkpointing, matrix products, convolutions and attention saved
* ``save_on_cpu``: `torch.autograd.graph.save_on_cpu(pin_memory=True)`; CUDA only
* ``offload_activations``: torchtune's, where it is installed; CUDA only
* ``budget:0.5``: `torch.compile` with that activation memory budget
* ``remat``, ``offload``, ``joint``: rotoff within a limit
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import rotoff

from .workloads import blocks

Run = Callable[[torch.Tensor], torch.Tensor]

OURS = ("joint", "remat", "offload")
PEERS = ("checkpoint", "checkpoint_sequential", "selective", "save_on_cpu", "offload_activations")
BUDGETS = ("budget:0.5", "budget:0.2")

_ATEN = torch.ops.aten
DEAR = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


class NotHere(Exception):
    """A method that this machine or model has no use for; the sentence says why."""


def prepare(method: str, model: nn.Module, x: torch.Tensor, limit: int | None, host_directory: str | None) -> Run:
    """`model`, run by `method` (of the module's list) within `limit` bytes where it takes a limit.

    Raises:
        NotHere: where the method cannot run here.
        rotoff.InfeasibleError: where nothing fits.
    """
    name, _, argument = method.partition(":")
    if name in OURS:
        if limit is None:
            raise ValueError(f"{method} needs a limit")
        return _rotoff(name, model, x, limit, host_directory)
    return _PEERS[name](model, x, argument)


def _rotoff(name: str, model: nn.Module, x: torch.Tensor, limit: int, host_directory: str | None) -> Run:
    wrapped = rotoff.Checkpointable(model, host_directory=host_directory)
    return wrapped.measure(x).compute_sequence(limit, mode=name)


def _plain(model: nn.Module, x: torch.Tensor, _: str) -> Run:
    return model


def _checkpoint(model: nn.Module, x: torch.Tensor, _: str) -> Run:
    return _wrapped(model, partial(checkpoint, use_reentrant=False))


def _selective(model: nn.Module, x: torch.Tensor, _: str) -> Run:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return _wrapped(model, partial(checkpoint, use_reentrant=False, context_fn=contexts))


def _wrapped(model: nn.Module, around: Callable[..., Any]) -> Run:
    for block in blocks(model):
        block.forward = partial(around, block.forward)  # type: ignore[method-assign]
    return model


def _checkpoint_sequential(model: nn.Module, x: torch.Tensor, argument: str) -> Run:
    """`argument`: the number of segments; the caller tries them (see `segment_counts`)."""
    if not isinstance(model, nn.Sequential):
        raise NotHere("checkpoint_sequential takes an nn.Sequential")
    count = int(argument) if argument else max(2, round(len(model) ** 0.5))
    return lambda value: checkpoint_sequential(model, count, value, use_reentrant=False)


def segment_counts(model: nn.Module) -> list[int]:
    """Segment counts worth a try, around the square root of the number of stages."""
    if not isinstance(model, nn.Sequential):
        return []
    root = len(model) ** 0.5
    return sorted({max(2, min(len(model), round(root * factor))) for factor in (0.5, 0.7, 1.0, 1.4, 2.0)})


def _in_context(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Run:
    def run(x: torch.Tensor) -> torch.Tensor:
        with context():
            return model(x)

    return run


def _save_on_cpu(model: nn.Module, x: torch.Tensor, _: str) -> Run:
    if x.device.type != "cuda":
        raise NotHere("save_on_cpu needs a device other than the CPU")
    return _in_context(model, partial(torch.autograd.graph.save_on_cpu, pin_memory=True))


def _offload_activations(model: nn.Module, x: torch.Tensor, _: str) -> Run:
    if x.device.type != "cuda":
        raise NotHere("OffloadActivations needs CUDA")
    if importlib.util.find_spec("torchtune") is None:
        raise NotHere("torchtune is not installed")
    from torchtune.training import OffloadActivations

    return _in_context(model, OffloadActivations)


def _budget(model: nn.Module, x: torch.Tensor, argument: str) -> Run:
    import torch._functorch.config as config

    config.activation_memory_budget = float(argument)
    # the budget is no part of the cache's key everywhere
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    return torch.compile(model)


_PEERS: dict[str, Callable[[nn.Module, torch.Tensor, str], Run]] = {
    "plain": _plain,
    "plain-again": _plain,
    "checkpoint": _checkpoint,
    "checkpoint_sequential": _checkpoint_sequential,
    "selective": _selective,
    "save_on_cpu": _save_on_cpu,
    "offload_activations": _offload_activations,
    "budget": _budget,
}
