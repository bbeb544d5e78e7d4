"""Bytes of gradients as they really lie: several in one storage, or a part of one that is larger than it.

The backward of a concatenation hands out views of one gradient, and each keeps all of it alive; a stage that passes a
value on passes its gradient on as it lies. So what δ_i holds follows from the stages after i.

Where a part waits for long, as the gradient of a U-Net's skip connection does, a copy of it lets the rest go: a little
time for many bytes, in every ``B`` until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch


class Layout(IntEnum):
    """How the numbers of a gradient follow each other, beside those of the tensor that it belongs to."""

    ALIKE = 0
    GAPS = 1  # in the same order: a part of a larger gradient, of which an elementwise kernel makes one without gaps
    ORDER = 2  # permuted or expanded, and so may be what an elementwise kernel makes of it

    @classmethod
    def of(cls, gradient: torch.Tensor, tensor: torch.Tensor) -> Layout:
        if gradient.layout is not torch.strided:
            return cls.ORDER
        usual = torch.empty_like(tensor, device="meta").stride()
        wide = [n for n, size in enumerate(gradient.shape) if size > 1]
        order = sorted(wide, key=lambda n: -usual[n])
        strides = [gradient.stride(n) for n in order]
        if strides == [usual[n] for n in order]:
            return cls.ALIKE
        return cls.GAPS if all(strides) and strides == sorted(strides, reverse=True) else cls.ORDER


class GradientPlace(NamedTuple):
    """The storage that holds one gradient. incoming: the output whose gradient it came in with, None for a fresh one.
    layout: where the gradients given lay as their tensors do; from_permuted: where they did not. untouched: whether
    that output is the input itself, so that its gradient is handed on without being read."""

    storage: int
    nbytes: int
    incoming: int | None
    layout: Layout = Layout.ALIKE
    from_permuted: Layout = Layout.ALIKE
    untouched: bool = False

    def lies(self, given: Sequence[Layout], read: Layout) -> Layout:
        """Its layout, where the gradients `given` have theirs; `read` is the strangest of those that are read."""
        came = read if self.incoming is None else given[self.incoming]
        if came is Layout.ORDER:
            return max(self.layout, self.from_permuted)
        return self.layout if self.incoming is None else max(self.layout, came)


class Charge(NamedTuple):
    """Bytes that one δ keeps alive. shared: of those, what lies in one storage with another tensor's gradient, and so
    may stay when the first of them has been used. copied: the tensors whose gradients are copies; copied_bytes: of
    those. fresh_bytes: what the backward had made before it copied. layout: the strangest of the gradients' that the
    next backward reads: a mean's is expanded, and so may be those before it. Kernels that want it contiguous copy it
    first."""

    nbytes: int
    shared: int = 0
    copied: tuple[int, ...] = ()
    copied_bytes: int = 0
    fresh_bytes: int = 0
    layout: Layout = Layout.ALIKE


Stages = Sequence[tuple[Sequence[GradientPlace | None], Sequence[int]]]


def charge(stages: Stages, compact: bool = False) -> list[Charge]:
    """What δ_0 to δ_L keep alive.

    Args:
        stages: of stages 1 to L, where the backward leaves each input's gradient, and the bytes of each output's
            gradient by itself. compact: whether parts of storages that are handed on further are copied.
    """
    L = len(stages)
    lying = {(L, n): size for n, size in enumerate(stages[-1][1])}  # storage -> bytes, of the present boundary
    held: list[tuple[int, int] | None] = list(lying)  # storage of each tensor's gradient
    layouts = [Layout.ALIKE] * len(held)
    charges = [Charge(sum(lying.values()))]
    for i in range(L, 0, -1):
        places = stages[i - 1][0]
        before, held_before = lying, held
        lying, held = {}, []
        for place in places:
            if place is None:
                held.append(None)
                continue
            came = held_before[place.incoming] if place.incoming is not None else None
            storage = came if came is not None else (i, place.storage)
            lying[storage] = before[storage] if came is not None else place.nbytes
            held.append(storage)
        untouched = {place.incoming for place in places if place is not None and place.untouched}
        read = max((one for n, one in enumerate(layouts) if n not in untouched), default=Layout.ALIKE)
        charges[-1] = charges[-1]._replace(layout=read)
        layouts = [Layout.ALIKE if place is None else place.lies(layouts, read) for place in places]
        fresh = sum(size for storage, size in lying.items() if storage not in before)
        copied = _waiting(held, lying, places, *stages[i - 2]) if compact and i > 1 else ()
        for n in copied:
            held[n] = i, ~n
            layouts[n] = Layout.ALIKE
            lying[i, ~n] = stages[i - 2][1][n]
        lying = {storage: lying[storage] for storage in held if storage is not None}
        alone = sum(stages[i - 2][1]) if i > 1 else 0
        places_of = Counter(storage for storage in held if storage is not None)
        shared = sum(lying[storage] for storage, tensors in places_of.items() if tensors > 1)
        size = sum(stages[i - 2][1][n] for n in copied)
        charges.append(Charge(max(sum(lying.values()), alone), shared, copied, size, fresh))
    return charges[::-1]


def _waiting(
    held: Sequence[tuple[int, int] | None],
    lying: Mapping[tuple[int, int], int],
    here: Sequence[GradientPlace | None],
    places: Sequence[GradientPlace | None],
    sizes: Sequence[int],
) -> tuple[int, ...]:
    """Tensors whose gradients fill a part of their storage only, one of which the next backward hands on; or will do so
    once that has used up the others, where it does not read theirs: only who reads a tensor can copy its gradient.

    here: where the gradients of these tensors are left. places, sizes: as in `charge`, of the stage that has these
    tensors as its outputs.
    """
    further = {place.incoming for place in places if place is not None}
    unread = {place.incoming for place in places if place is not None and place.untouched}
    found: list[int] = []
    for storage, nbytes in lying.items():
        inside = [n for n, one in enumerate(held) if one == storage]
        if nbytes == sum(sizes[n] for n in inside):
            waiting = [n for n in inside if n in unread] if not further.issuperset(inside) else []
        else:
            waiting = inside if further.intersection(inside) else []
        found += waiting if all(not one.untouched for n in waiting if (one := here[n]) is not None) else []
    return tuple(sorted(found))
