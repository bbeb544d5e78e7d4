"""The casts of weights that autocast keeps: one of each float32 weight, for all its uses, until the outermost region is
left, whatever a plan drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.autocast import Casts, in_region, uncached_autocast
from ..known_tensors import KnownTensors
from ..tape import Owned


class WeightCast(NamedTuple):
    """An operation casts `weight` to `dtype`, which takes `nbytes`, in the `region`-th region of the forward."""

    region: int
    weight: Owned
    dtype: torch.dtype
    nbytes: int


class WeightCasts:
    """Finds these casts while a forward is recorded. Those in a region of the user's take none of the model's bytes."""

    def __init__(self, tensors: KnownTensors) -> None:
        self._tensors = tensors
        self._region = 0
        self._kept: dict[WeightCast, bool] = {}  # whether autograd saves the cast
        self._uses: Counter[WeightCast] = Counter()
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
    def seen(self, casting: bool) -> Iterator[list[WeightCast]]:
        """Yield a list, which gets the casts made in the block if `casting`."""
        found: list[WeightCast] = []
        if not (casting and torch.is_autocast_cache_enabled()):
            yield found
            return
        made: dict[tuple[Owned, torch.dtype, int], StorageWeakRef] = {}  # storages of the casts

        def note(tensor: torch.Tensor, cast: torch.Tensor) -> None:
            owners = self._tensors.owners(tensor) if tensor.requires_grad else ()
            for one in [one for one in owners if one.table == "_parameters" and one.tensor is tensor][:1]:
                made[one, cast.dtype, cast.nbytes] = StorageWeakRef(cast.untyped_storage())
                self._uses[WeightCast(self._region, one, cast.dtype, cast.nbytes)] += 1

        with uncached_autocast(), Casts(note):  # without the cache, each use casts again
            yield found
        for one, storage in made.items() if self._alone else ():
            cast = WeightCast(self._region, *one)
            found.append(cast)
            self._kept[cast] = self._kept.get(cast, False) or self._tensors.knows(storage)

    @property
    def again(self) -> frozenset[Owned]:
        """The weights of which a region uses one cast more than once."""
        return frozenset(cast.weight for cast, uses in self._uses.items() if uses > 1)

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


def _largest(casts: Iterable[WeightCast]) -> int:
    regions: dict[int, int] = {}
    for cast in casts:
        regions[cast.region] = regions.get(cast.region, 0) + cast.nbytes
    return max(regions.values(), default=0)
