"""What autocast keeps: a cast of every float32 weight that a forward uses, until the outermost region is left.

With its cache on (the default) autocast makes such a cast where a weight is first used, and autograd saves it like a
tensor that was there all along. In a step these bytes come with the forward and stay into the backward; a replay in the
backward, where the user's region has been left, makes those of its stage once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...tensors.storage import key_of
from ..timing.harness import Run
from .allocator import Allocator


def kept_casts(run: Run, allocator: Allocator) -> dict[int, int]:
    """Storages of the weights that a forward of `run` has autocast keep a cast of, and the bytes of that cast; none
    outside of autocast."""
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return {}
    torch.clear_autocast_cache()
    with _Casts(run) as casts:
        run.forward(run.leaves())
    return {key: allocator.rounded(nbytes) for key, nbytes, storage in casts.made if not storage.expired()}


class _Casts(TorchDispatchMode):
    """Notes what is made of the weights in another type, without keeping it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.made: list[tuple[int, int, StorageWeakRef]] = []  # (storage of the weight, bytes of the cast, its storage)
        self._weights = {key_of(p) for p in run.parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (key := key_of(args[0])) in self._weights and key is not None:
            storage = result.untyped_storage()
            self.made.append((key, storage.nbytes(), StorageWeakRef(storage)))
        return result
