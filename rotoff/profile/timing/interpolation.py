"""Times of a model at a new size, from those measured at two others: a batch of 24 between batches of 16 and 32.

Only times are found so, since they only steer the plan; bytes, behaviours and what forms keep are measured at every size. A time
is taken to be linear in the size between the two, and for a little beyond them. What keeps that safe: the two are of
the same stages and differ from the new size, and from each other, in nothing but that one size; they are not far apart; and
they were measured themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...tensors.convolutions import flags
from ..profile import Profile
from .timing_cache import KnownForm, KnownTimes, StageTimes, times_of

APART = 4.0  # times the smaller size, at most, is the larger: further apart, attention's square is no line
BEYOND = 1.5  # times a measured size, and no further from it than the two are from each other
KEPT = 64  # sizes whose times are kept; a few numbers for each stage

# Of each leaf of the input (shape, dtype, device, requires_grad, strides unless contiguous), or a text; as `Checkpointable` tells
# signatures apart.
Shapes = tuple[Any, ...]
Places = tuple[tuple[int, int], ...]  # (leaf, dimension) of what differs


class Interpolated(NamedTuple):
    """times: of all stages, with no link. between: the sizes that they are from, in words."""

    times: KnownTimes
    between: str


class MeasuredTimes:
    """Times of one model at the sizes measured so far."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[Hashable, Hashable, Shapes], tuple[StageTimes, ...]] = OrderedDict()

    def add(self, shapes: Shapes, surroundings: Hashable, stages: Hashable, profile: Profile) -> None:
        """Remember the times of `profile`, measured on an input of these shapes.

        surroundings: all else that times depend on. stages: which they are.
        """
        key = surroundings, stages, shapes
        self._rows[key] = times_of(profile)
        self._rows.move_to_end(key)
        while len(self._rows) > KEPT:
            self._rows.popitem(last=False)

    def find(self, shapes: Shapes, surroundings: Hashable, stages: Hashable) -> Interpolated | None:
        """Times at `shapes` from two sizes measured; None where none are near enough."""
        lines: dict[Places, dict[int, tuple[StageTimes, ...]]] = {}
        for (theirs, made, other), rows in self._rows.items():
            if (theirs, made) == (surroundings, stages) and (found := _one_size(shapes, other)) is not None:
                places, size = found
                lines.setdefault(places, {})[size] = rows
        for places, sizes in lines.items():
            new = shapes[places[0][0]][0][places[0][1]]
            pair = _pair(new, sorted(sizes))
            if pair is None:
                continue
            low, high = pair
            if [row.name for row in sizes[low]] != [row.name for row in sizes[high]]:
                continue
            share = (new - low) / (high - low)
            rows = tuple(_between(a, b, share) for a, b in zip(sizes[low], sizes[high], strict=True))
            dimensions = {dimension for _, dimension in places}
            what = "batch" if dimensions == {0} else f"dimension {min(dimensions)} of"
            return Interpolated(KnownTimes(rows, None), f"{what} {low} and {high}")
        return None


def surroundings(model: nn.Module, autocast: Hashable) -> Hashable:
    """What the times of `model` depend on beside its stages and shapes, and may change within a process."""
    trained = tuple(p.requires_grad for p in model.parameters())
    return trained, autocast, torch.get_num_threads(), torch.get_float32_matmul_precision(), flags()


def _one_size(new: Shapes, old: Shapes) -> tuple[Places, int] | None:
    """Where the two differ, and the old size there, where it is one size that differs."""
    if len(new) != len(old):
        return None
    places, sizes = [], set()
    for leaf, (a, b) in enumerate(zip(new, old, strict=True)):
        if a == b:
            continue
        if isinstance(a, str) or isinstance(b, str) or _all_but_sizes(*a) != _all_but_sizes(*b):
            return None
        for dimension, pair in enumerate(zip(a[0], b[0], strict=True)):
            if pair[0] != pair[1]:
                places.append((leaf, dimension))
                sizes.add(pair)
    if len(sizes) != 1:
        return None
    ((_, size),) = sizes
    return tuple(places), size


def _all_but_sizes(shape: Sequence[int], *more: Any) -> Hashable:
    """What a tensor has in common with one of another size. Of its strides: the order of the dimensions in memory, which ones lie
    close on the next, and which are expanded."""
    strides = more[3] if len(more) > 3 else ()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    ends = [*(shape[d] * strides[d] for d in order[1:]), 1]
    layout = [(d, strides[d] == end, strides[d] == 0) for d, end in zip(order, ends, strict=False)]
    return len(shape), more[:3], tuple(layout)


def _pair(new: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """The two of the measured `sizes`, smaller first, that times at `new` may come from."""
    below, above = [s for s in sizes if s < new], [s for s in sizes if s > new]
    if below and above:
        low, high = below[-1], above[0]
    elif len(sizes) < 2:
        return None
    else:
        low, high = (below[-2], below[-1]) if below else (above[0], above[1])
        nearest = high if below else low
        far = new > BEYOND * nearest or nearest > BEYOND * new
        if far or abs(new - nearest) > high - low:
            return None
    return (low, high) if low > 0 and high <= APART * low else None


def _between(a: StageTimes, b: StageTimes, share: float) -> StageTimes:
    def at(low: float, high: float) -> float:
        return max(0.0, low + share * (high - low))

    others = dict(b.forms)
    forms = tuple(KnownForm(form, at(seconds, others[form])) for form, seconds in a.forms if form in others)
    times = (at(a.forward_time, b.forward_time), at(a.backward_time, b.backward_time), at(a.tail_time, b.tail_time))
    return StageTimes(a.name, *times, forms, a.host_bound or b.host_bound)
