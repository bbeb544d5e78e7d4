"""The casts of weights that autocast keeps: one of each float32 weight, for all its uses, until the outermost region is
left, whatever a plan drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.autocast import Casts, in_region, uncached_autocast
from ..known_tensors import KnownTensors
from ..tape import Owned, Tape

_CONVERSIONS = frozenset(["to", "type", "type_as", "bfloat16", "half"])  # autocast does not keep what they make


class WeightCast(NamedTuple):
    """An operation casts `weight` to `dtype`, which takes `nbytes`, in the `region`-th region of the forward."""

    region: int
    weight: Owned
    dtype: torch.dtype
    nbytes: int


class WeightCasts:
    """Finds these casts while a forward is recorded. The bytes of those in a region of the user's are measured
    (`profile.memory.casts`)."""

    def __init__(self, tensors: KnownTensors) -> None:
        self._tensors = tensors
        self._region = 0
        self._kept: dict[WeightCast, bool] = {}  # whether autograd saves the cast
        self._alone = not in_region()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the regions: leaving an outermost region empties the cache of casts."""
        clear = torch.clear_autocast_cache

        def counted() -> None:
            self._region += 1
            clear()

        torch.clear_autocast_cache = counted
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear

    @contextmanager
    def seen(self, function: Any, name: str) -> Iterator[list[WeightCast]]:
        """Yield a list, which gets the casts made in the block, one for each use. The block calls `function`, which is
        named `name`; of a module, each weight counts as used once, since the calls within are unknown."""
        found: list[WeightCast] = []
        kept = torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled() and name not in _CONVERSIONS
        if not kept or isinstance(function, nn.Module):
            yield found
            found += [one for one in map(self._cast, function.parameters()) if one is not None] if kept else []
            return
        made: dict[WeightCast, StorageWeakRef] = {}

        def note(tensor: torch.Tensor, cast: torch.Tensor) -> None:
            if (one := self._cast(tensor)) is not None and one.dtype is cast.dtype:
                found.append(one)
                made[one] = StorageWeakRef(cast.untyped_storage())

        with uncached_autocast(), Casts(note):  # without the cache, each use casts again
            yield found
        for one, storage in made.items() if self._alone else ():
            self._kept[one] = self._kept.get(one, False) or self._tensors.knows(storage)

    def _cast(self, tensor: torch.Tensor) -> WeightCast | None:
        """Return the cast that autocast makes of `tensor` and keeps; None if it keeps none."""
        if tensor.dtype is not torch.float32 or not tensor.requires_grad:
            return None
        dtype = torch.get_autocast_dtype(tensor.device.type)
        owners = [one for one in self._tensors.owners(tensor) if one.table == "_parameters" and one.tensor is tensor]
        return WeightCast(self._region, owners[0], dtype, tensor.numel() * dtype.itemsize) if owners else None

    @property
    def kept_bytes(self) -> int:
        """What the largest region keeps to its end."""
        return _largest(self._kept)

    @property
    def unsaved_bytes(self) -> int:
        """The part of that which autograd does not save."""
        return _largest(cast for cast, saved in self._kept.items() if not saved)

    @property
    def saved(self) -> frozenset[WeightCast]:
        """The casts that autograd also saves."""
        return frozenset(cast for cast, saved in self._kept.items() if saved)


def cast_again(tape: Tape) -> frozenset[tuple[nn.Module, str]]:
    """Return (module, name) of the parameters of which autocast uses one cast more than once."""
    operations = [inner for op in tape.operations for inner in tape.inner.get(id(op), (op,))]
    uses = Counter(cast for op in operations for cast in op.casts)
    return frozenset((cast.weight.module, cast.weight.name) for cast, count in uses.items() if count > 1)


def _largest(casts: Iterable[WeightCast]) -> int:
    regions: dict[int, int] = {}
    for cast in casts:
        regions[cast.region] = regions.get(cast.region, 0) + cast.nbytes
    return max(regions.values(), default=0)
