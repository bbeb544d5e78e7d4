"""What was measured at some sizes of the input, and what that says of the others.

A plan made for sizes that are a little larger serves all that are not, so sizes are rounded up before they are looked
up: to one of eight steps from each power of two to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..profile.between_sizes import NotAlike, Share, between
from ..profile.profile import Profile
from ..tensors.tree import flatten

STEPS = 8  # from one power of two to the next
GRAIN = 16  # of which sizes are rounded to multiples, from twice as much on, since models pad to such
IMAGE, DEEP = 4, 32  # likewise of the last dimensions of tensors with so many, which deep networks divide by this
BEYOND = 2.0
MEASURED = 16  # that are kept
NEAR = 1.25  # times its own bytes, a size is charged as a larger one without a look at others

Sizes = tuple[tuple[int, ...], ...]  # of each tensor of the input


class HasProfile(Protocol):
    """What was measured."""

    @property
    def profile(self) -> Profile: ...


Of = TypeVar("Of", bound=HasProfile)


class Near(NamedTuple, Generic[Of]):
    """profile: that charges no less than the sizes asked for take. like: what was measured at the larger of the sizes
    it is from."""

    profile: Profile
    like: Of


def split(shapes: Sequence[Sequence[Any]]) -> tuple[Any, Sizes]:
    """What inputs of all sizes have in common, and the sizes.

    shapes: of each tensor (shape, dtype, device, requires_grad, strides unless contiguous), as
    `specialization.signature` tells them.
    """
    return tuple(_all_but_sizes(*one) for one in shapes), tuple(tuple(one[0]) for one in shapes)


def rounded(sizes: Sizes) -> Sizes:
    """The sizes that stand for `sizes`, none smaller."""
    return tuple(
        tuple(_rounded(size, DEEP if len(shape) >= IMAGE and d >= 2 else GRAIN) for d, size in enumerate(shape))
        for shape in sizes
    )


def _rounded(size: int, grain: int) -> int:
    step = 1 << max(0, size.bit_length() - STEPS.bit_length())
    if size >= 2 * grain:
        step = max(step, grain)
    return -(-size // step) * step


class MeasuredSizes(Generic[Of]):
    """What was measured of one model at inputs that differ in sizes alone."""

    def __init__(self) -> None:
        self._rows: dict[Sizes, Of] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Of]:
        return iter(self._rows.values())

    @property
    def sizes(self) -> list[Sizes]:
        """Those measured, the last one last."""
        return list(self._rows)

    @property
    def last(self) -> Of:
        """What was measured last."""
        return next(reversed(self._rows.values()))

    def add(self, sizes: Sizes, measured: Of) -> None:
        """Remember what was `measured` at `sizes`."""
        self._rows.pop(sizes, None)
        self._rows[sizes] = measured
        while len(self._rows) > MEASURED:
            del self._rows[next(iter(self._rows))]

    def near(self, wanted: Sizes, sizes: Sizes, beyond: float = BEYOND) -> Near[Of] | None:
        """A profile for `sizes` and all others up to `wanted`; None where what was measured does not tell.

        From two that were measured, where the line between them leads past `sizes`; else the smallest that is larger.
        beyond: how far from the smaller of the two, as a multiple of what lies between them.
        """
        found: list[Near[Of]] = []
        for (low, smaller), (high, larger) in product(self._rows.items(), repeat=2):
            place = position(low, high, wanted)
            if place is None:
                continue
            if place > 1 and covers(high, sizes):
                place = 1.0
            if place == 0.0 or place == 1.0:
                one = larger if place else smaller
                found.append(Near(one.profile, one))
            elif place <= beyond:
                try:
                    found.append(
                        Near(between(smaller.profile, larger.profile, Share.at(place, _degree(low, high))), larger)
                    )
                except NotAlike:
                    continue
        if not found:
            larger_ones = [(high, one) for high, one in self._rows.items() if covers(high, sizes)]
            if len(self._rows) > 2:
                found = [Near(one.profile, one) for _, one in larger_ones]
            else:
                found = [Near(one.profile, one) for high, one in larger_ones if volume(high) <= NEAR * volume(sizes)]
        return min(found, key=lambda one: sum(stage.saved_bytes for stage in one.profile.chain.stages), default=None)


def position(low: Sizes, high: Sizes, sizes: Sizes) -> float | None:
    """How far on the line from `low` to `high`, 0 to 1 and beyond, all of `sizes` are covered; None where none of it
    does."""
    place = 0.0
    for one, other, shape in zip(low, high, sizes, strict=True):
        for a, b, size in zip(one, other, shape, strict=True):
            if (
                b < a or (a == b and size > a) or (b > a and a < 2)
            ):  # one of a size is often handled in a way of its own
                return None
            if b > a:
                place = max(place, (size - a) / (b - a))
    return None if low == high else place


def covers(high: Sizes, sizes: Sizes) -> bool:
    """Whether none of `sizes` is larger than `high`."""
    return all(a >= b for one, other in zip(high, sizes, strict=True) for a, b in zip(one, other, strict=True))


def halves(value: Any) -> list[Any]:
    """Inputs like `value` of half its batch, and, where it has whole numbers in rows (tokens), of half their length."""
    tensors, rebuild = flatten(value)
    batch = tensors[0].shape[0] if tensors[0].dim() else 1
    length = next((t.shape[1] for t in tensors if t.dim() >= 2 and not t.is_floating_point()), 1)
    found = []
    for dimension, size in ((0, batch), (1, length)):
        if size >= 4:
            parts = [t.dim() > dimension and t.shape[dimension] == size for t in tensors]
            cut = [
                t.narrow(dimension, 0, size // 2).clone() if part else t for t, part in zip(tensors, parts, strict=True)
            ]
            found.append(rebuild([t.requires_grad_(of.requires_grad) for t, of in zip(cut, tensors, strict=True)]))
    return found


def volume(sizes: Sizes) -> int:
    """Elements of the largest tensor."""
    return max(math.prod(shape) for shape in sizes)


def _degree(low: Sizes, high: Sizes) -> int:
    """Of bytes along the line: at most the square of each size of a tensor that grows, as of attention's matrix."""
    return 2 * max(sum(b > a for a, b in zip(one, other, strict=True)) for one, other in zip(low, high, strict=True))


def _all_but_sizes(shape: Sequence[int], *more: Any) -> Any:
    """What a tensor has in common with one of another size. Of its strides: the order of the dimensions in memory,
    which ones lie close on the next, and which are expanded."""
    strides = more[3] if len(more) > 3 else ()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    ends = [*(shape[d] * strides[d] for d in order[1:]), 1]
    layout = [(d, strides[d] == end, strides[d] == 0) for d, end in zip(order, ends, strict=False)]
    return len(shape), more[:3], tuple(layout)
