"""The casts that autocast keeps: one of each float32 weight that a forward uses, until the outermost region is left.

With autocast's cache on (the default), the first use of a weight makes the cast, and autograd saves it like a tensor
that existed before. In a step these bytes appear in the forward and stay into the backward. A replay runs in the
backward, outside of the user's region, and makes the casts of its stage again.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.autocast import Casts, in_region
from ...tensors.storage import key_of
from ..timing.harness import Run
from .allocator import Allocator


def kept_casts(run: Run, allocator: Allocator) -> dict[int, int]:
    """Return the bytes of the cast that autocast keeps of each weight (by storage) after a forward; empty outside of
    autocast's regions."""
    if not (in_region() and torch.is_autocast_cache_enabled()):
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
