"""The casts of weights that autocast keeps: one of each float32 weight, for all its uses, until the outermost region is
left, whatever a plan drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.autocast import Casts, in_region, uncached_autocast
from ..known_tensors import KnownTensors
from ..tape import Owned, RecordedCall, Tape

_CONVERSIONS = frozenset(["to", "type", "type_as", "bfloat16", "half"])  # autocast does not keep what they make


class WeightCast(NamedTuple):
    """An operation casts `weight` to `dtype`, which takes `nbytes`, in the `region`-th region of the forward."""

    region: int
    weight: Owned
    dtype: torch.dtype
    nbytes: int


class CastRegion(NamedTuple):
    """The casts that one region within the model keeps to its end.

    Attributes:
        first, last: the stages in whose forwards it may be open.
        nbytes: of all its casts.
        unsaved: of those that no stage has in its ā, or only some of the stages that use them.
        saved: for each stage, of the others that it has in its ā.
        shared: of those that several stages use. The sum of their gradients, in the same dtype, waits from the first of
            these stages' backwards to the last.
    """

    first: int
    last: int
    nbytes: int
    unsaved: int
    saved: tuple[int, ...]
    shared: int


class WeightCasts:
    """Finds these casts while a forward is recorded. The bytes of those in a region of the user's are measured
    (`profile.memory.casts`).

    Attributes:
        kept: the casts, and whether autograd saves each of them at every use.
        ends: for each region, how many `operations` were recorded when it was left.
    """

    def __init__(self, tensors: KnownTensors, operations: list[RecordedCall]) -> None:
        self._tensors = tensors
        self._operations = operations
        self.kept: dict[WeightCast, bool] = {}
        self.ends: list[int] = []
        self._alone = not in_region()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the regions: leaving an outermost region empties the cache of casts."""
        clear = torch.clear_autocast_cache

        def counted() -> None:
            self.ends.append(len(self._operations))
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
            self.kept.update(dict.fromkeys(found if self._alone else (), False))
            return
        made: dict[WeightCast, StorageWeakRef] = {}

        def note(tensor: torch.Tensor, cast: torch.Tensor) -> None:
            if (one := self._cast(tensor)) is not None and one.dtype is cast.dtype:
                found.append(one)
                made[one] = StorageWeakRef(cast.untyped_storage())

        with uncached_autocast(), Casts(note):  # without the cache, each use casts again
            yield found
        for one, storage in made.items() if self._alone else ():
            self.kept[one] = self.kept.get(one, True) and self._tensors.knows(storage)

    def _cast(self, tensor: torch.Tensor) -> WeightCast | None:
        """Return the cast that autocast makes of `tensor` and keeps; None if it keeps none."""
        if tensor.dtype is not torch.float32 or not tensor.requires_grad:
            return None
        dtype = torch.get_autocast_dtype(tensor.device.type)
        owners = [one for one in self._tensors.owners(tensor) if one.table == "_parameters" and one.tensor is tensor]
        return WeightCast(len(self.ends), owners[0], dtype, tensor.numel() * dtype.itemsize) if owners else None


def cast_again(tape: Tape) -> frozenset[tuple[nn.Module, str]]:
    """Return (module, name) of the parameters of which autocast uses one cast more than once."""
    operations = [inner for op in tape.operations for inner in tape.inner.get(id(op), (op,))]
    uses = Counter(cast for op in operations for cast in op.casts)
    return frozenset((cast.weight.module, cast.weight.name) for cast, count in uses.items() if count > 1)


def cast_regions(tape: Tape, stage_of: Mapping[int, int], count: int) -> tuple[CastRegion, ...]:
    """Return the regions of `tape`, cut into `count` stages. stage_of: by an operation's id, for those in stages."""
    stage, stages = 1, [1]  # the stage that is open after each number of operations
    users: dict[int, dict[WeightCast, set[int]]] = {}  # by region: the stages that use a cast, 0 if it is in no ā
    first: dict[int, int] = {}
    for op in tape.operations:
        own = stage_of.get(id(op), 0)
        stage = own or stage
        stages.append(stage)
        for cast in tape.casts.keys() & {*op.casts}:
            region = cast.region if tape.region_ends else 0  # of a union, whose regions may be others: one for all
            first.setdefault(region, stage)
            using = users.setdefault(region, {}).setdefault(cast._replace(region=region), set())
            using.update({own} if tape.casts[cast] else {own, 0})
    found = []
    for region, casts in users.items():
        last = stages[tape.region_ends[region]] if region < len(tape.region_ends) else count
        saved = [
            sum(one.nbytes for one, using in casts.items() if i in using and 0 not in using)
            for i in range(1, count + 1)
        ]
        unsaved = sum(one.nbytes for one, using in casts.items() if 0 in using)
        shared = sum(one.nbytes for one, using in casts.items() if len(using - {0}) > 1)
        found.append(CastRegion(first[region], last, sum(one.nbytes for one in casts), unsaved, tuple(saved), shared))
    return tuple(found)
