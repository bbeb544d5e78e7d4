"""Autocast around what is recorded, measured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..accelerator import TYPES

Autocast = tuple[tuple[str, bool, torch.dtype], ...]  # (type of device, whether autocast is on, its dtype)


def autocast_now() -> Autocast:
    """Return the present settings."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return tuple([(kind, enabled(kind), dtype(kind)) for kind in TYPES])


def in_region() -> bool:
    """Return whether an autocast region is open, even one that is switched off: regions within it keep their casts of
    weights until it is left."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def autocast_as(before: Autocast, cached: bool | None = None, region: bool = False) -> ExitStack:
    """Set autocast as it was `before`, until the returned stack is closed. cached: whether it caches casts of weights;
    None: as now. region: whether to open a region in any case."""
    stack = ExitStack()
    for kind, enabled, dtype in before:
        alike = (enabled, dtype) == (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        if region or not alike or cached not in (None, torch.is_autocast_cache_enabled()):
            stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
    return stack


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Switch off autocast's cache of weights, so that a run's operations do not depend on what ran before."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def casts_dropped() -> Iterator[None]:
    """Empty autocast's cache of weights after the block: the casts in it are older than the graph of a step that would
    use them, and autograd adds gradients up in the order of age."""
    try:
        yield
    finally:
        torch.clear_autocast_cache()


class Casts(TorchDispatchMode):
    """Calls `note` with each tensor that is cast and with the result."""

    def __init__(self, note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._note(args[0], result)
        return result
