"""Hooks on the tensors that autograd saves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import MeasureError
from .storage import local


class _Sharded(NamedTuple):
    packed: Any
    like: Callable[[torch.Tensor], torch.Tensor]  # makes the DTensor from its shard


def saved_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
    """Return ``saved_tensors_hooks`` that get the local shard of each DTensor."""
    if "torch.distributed.tensor" not in sys.modules:  # then there are no DTensors
        return saved_tensors_hooks(pack, unpack)

    def pack_local(tensor: torch.Tensor) -> Any:
        shard = local(tensor)
        return pack(shard) if shard is tensor else _Sharded(pack(shard), _kind(tensor))

    def unpack_local(packed: Any) -> torch.Tensor:
        return packed.like(unpack(packed.packed)) if type(packed) is _Sharded else unpack(packed)

    return saved_tensors_hooks(pack_local, unpack_local)


def _kind(tensor: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a DTensor like `tensor` from its shard."""
    kind, spec = type(tensor), tensor._spec
    return lambda shard: kind(shard, spec, requires_grad=False)


def watch_saved(look: Callable[[torch.Tensor], object]) -> saved_tensors_hooks:
    """Return hooks for a run that is observed and has no backward: `look` is called with each saved tensor, in order,
    and the graph keeps what it returns instead of the tensor."""
    return saved_hooks(look, _never)


def _never(_: Any) -> torch.Tensor:
    raise MeasureError(
        "the forward differentiates (torch.autograd.grad, backward), which rotoff cannot follow: do this in the"
        " training loop, outside of the planned model"
    )


def foreign_hooks() -> tuple[str, str] | None:
    """Return the predicate and the end of an error sentence about active saved-tensor hooks that are neither torch's
    nor rotoff's; None if there are none. Planned steps have hooks of their own."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or str(getattr(hooks[0], "__module__", "")).split(".")[0] in ("torch", "rotoff"):
        return None
    name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
    return (
        f"runs under saved-tensor hooks ({name})",
        ", which planned steps would bypass because they have their own: leave them out",
    )
