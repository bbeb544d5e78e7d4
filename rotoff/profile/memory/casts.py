"""What autocast keeps: a cast of every float32 weight that a forward uses, until the outermost region is left.

With its cache on (the default) autocast makes such a cast where a weight is first used, and autograd saves it like a
tensor that was there all along. In a step these bytes come with the forward and stay into the backward; a replay in the
backward, where the user's region has been left, makes those of its stage once more.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.autocast import Casts
from ...tensors.storage import key_of
from ..timing.harness import Run
from .allocator import Allocator


def kept_casts(run: Run, allocator: Allocator) -> dict[int, int]:
    """Storages of the weights that a forward of `run` has autocast keep a cast of, and the bytes of that cast; none
    outside of autocast."""
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return {}
    weights = {key_of(p) for p in run.parameters}
    made: list[tuple[int, int, StorageWeakRef]] = []  # (storage of the weight, bytes of the cast, its storage)

    def note(tensor: torch.Tensor, cast: torch.Tensor) -> None:
        if (key := key_of(tensor)) in weights and key is not None:
            storage = cast.untyped_storage()
            made.append((key, storage.nbytes(), StorageWeakRef(storage)))

    torch.clear_autocast_cache()
    with Casts(note):
        run.forward(run.leaves())
    return {key: allocator.rounded(nbytes) for key, nbytes, storage in made if not storage.expired()}
