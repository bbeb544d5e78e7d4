"""Casts of weights that an autocast region within the model shares.

Autocast casts a float32 weight once for all its uses until the outermost region is left, so that the parts of its
gradient are added in the narrow type. Recorded operations run in regions of their own; a weight that several of one
region use is cast by an operation of its own then, and what that makes is a value like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.autocast import Casts, uncached_autocast
from ..known_tensors import KnownTensors
from ..tape import Operation, Owned, Ref, Tape, Variable, leaves, substitute


class WeightCast(NamedTuple):
    """That an operation casts `weight` to `dtype`, which takes `nbytes`, in the `region`-th region of the forward."""

    region: int
    weight: Owned
    dtype: torch.dtype
    nbytes: int


class WeightCasts:
    """Finds them while a forward is recorded, outside of any region of the user's."""

    def __init__(self, tensors: KnownTensors) -> None:
        self._tensors = tensors
        self._region = 0
        self._kept: dict[WeightCast, bool] = {}  # and whether autograd saves it
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        self._alone = depth == 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Leaving an outermost region empties the cache of casts, and so begins the next region."""
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
        """What is run within casts these; nothing is looked for unless `casting`."""
        found: list[WeightCast] = []
        if not (casting and self._alone and torch.is_autocast_cache_enabled()):
            yield found
            return
        made: dict[tuple[Owned, torch.dtype, int], StorageWeakRef] = {}  # and the storage of the cast

        def note(tensor: torch.Tensor, cast: torch.Tensor) -> None:
            owners = self._tensors.owners(tensor) if tensor.requires_grad else ()
            for one in [one for one in owners if one.table == "_parameters" and one.tensor is tensor][:1]:
                made[one, cast.dtype, cast.nbytes] = StorageWeakRef(cast.untyped_storage())

        with uncached_autocast(), Casts(note):  # each use shows, whatever was cast before
            yield found
        for one, storage in made.items():
            cast = WeightCast(self._region, *one)
            found.append(cast)
            self._kept[cast] = self._kept.get(cast, False) or self._tensors.knows(storage)

    @property
    def kept_bytes(self) -> int:
        """What the largest region keeps to its end."""
        return _largest(self._kept)

    @property
    def unsaved_bytes(self) -> int:
        """Of that, what autograd does not save."""
        return _largest(cast for cast, saved in self._kept.items() if not saved)

    @property
    def saved(self) -> frozenset[WeightCast]:
        """Those that autograd saves, too."""
        return frozenset(cast for cast, saved in self._kept.items() if saved)


def _largest(casts: Iterable[WeightCast]) -> int:
    regions: dict[int, int] = {}
    for cast in casts:
        regions[cast.region] = regions.get(cast.region, 0) + cast.nbytes
    return max(regions.values(), default=0)


def share(tape: Tape) -> None:
    """Have what several operations of one region cast be cast once, before the first of them."""
    users: dict[WeightCast, list[Operation]] = {}
    for operation in tape.operations:
        for cast in operation.casts:
            users.setdefault(cast, []).append(operation)
    shared: dict[WeightCast, int] = {}  # and the variable that it makes
    known = [v.storage for v in tape.variables if v.storage is not None]
    storage = max([*known, *(n for operation in tape.operations for n, _ in operation.saves)], default=-1)
    for cast, using in users.items():
        if len(using) > 1 and all(operation.grad for operation in using):
            storage += 1
            shared[cast] = len(tape.variables)
            tape.variables.append(Variable(storage, cast.nbytes, needs_grad=True))
    operations: list[Operation] = []
    made: set[WeightCast] = set()
    for operation in tape.operations:
        numbers = {cast.weight: shared[cast] for cast in operation.casts if cast in shared}
        for cast in operation.casts:
            if cast in shared and cast not in made:
                made.add(cast)
                operations.append(_cast(cast, shared[cast], operation))
        operations.append(_taking(operation, numbers) if numbers else operation)
    tape.operations[:] = operations


def _cast(cast: WeightCast, number: int, before: Operation) -> Operation:
    own = Operation(torch.Tensor.to, (cast.weight, cast.dtype), {}, (number,), added=True)
    return replace(own, grad=before.grad, place=before.place, keys=before.keys)


def _taking(operation: Operation, numbers: dict[Owned, int]) -> Operation:
    """The operation with variables in place of weights."""

    def changed(leaf: Any) -> Any:
        return Ref(numbers[leaf]) if type(leaf) is Owned and leaf in numbers else leaf

    args, kwargs = substitute((operation.args, operation.kwargs), changed)
    reads = dict.fromkeys(leaf.variable for leaf in leaves((args, kwargs)) if isinstance(leaf, Ref))
    return replace(operation, args=args, kwargs=kwargs, reads=tuple(reads), casts=())
