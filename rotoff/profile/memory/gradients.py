"""Bytes of gradients as they lie in memory: several in one storage, or one in a part of a larger storage.

The backward of a concatenation returns views of one gradient, and each view keeps all of it alive. A stage that passes
a value on also passes on its gradient with its storage. So the bytes of δ_i follow from the stages after i.

If a part waits for long, as the gradient of a U-Net's skip connection does, copying it frees the rest: a little time
for many bytes, in every ``B`` until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch


class Layout(IntEnum):
    """How the layout of a gradient differs from that of its tensor."""

    ALIKE = 0
    GAPS = 1  # same order, a part of a larger gradient; an elementwise kernel returns one without gaps
    ORDER = 2  # permuted or expanded; an elementwise kernel may return the same layout

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
    """The storage that holds one gradient.

    Attributes:
        incoming: the output whose gradient has the same storage; None for a new storage.
        layout: if the given gradients have the layouts of their tensors.
        from_permuted: the layout if they do not.
        untouched: whether that output is the input itself, so that its gradient is passed on without being read.
    """

    storage: int
    nbytes: int
    incoming: int | None
    layout: Layout = Layout.ALIKE
    from_permuted: Layout = Layout.ALIKE
    untouched: bool = False

    def layout_given(self, given: Sequence[Layout], read: Layout) -> Layout:
        """Return the layout if the incoming gradients have the layouts `given`; `read` is the worst of those that are
        read."""
        came = read if self.incoming is None else given[self.incoming]
        if came is Layout.ORDER:
            return max(self.layout, self.from_permuted)
        return self.layout if self.incoming is None else max(self.layout, came)


class Charge(NamedTuple):
    """Bytes that one δ keeps alive.

    Attributes:
        shared: those in storages with several tensors' gradients, which may stay when the first of them has been used.
        copied: the tensors whose gradients are copies; copied_bytes: of these copies.
        fresh_bytes: what the backward had made before it copied.
        layout: the worst layout of a gradient that the next backward reads. A mean's gradient is expanded, and those
            before it may be; kernels that need contiguous input copy it first.
        alike: whether all gradients, read or not, have the layouts of their tensors.
        waiting: those of gradients of parameters that several stages use, which autograd holds from the first part to
            the last.
    """

    nbytes: int
    shared: int = 0
    copied: tuple[int, ...] = ()
    copied_bytes: int = 0
    fresh_bytes: int = 0
    layout: Layout = Layout.ALIKE
    alike: bool = True
    waiting: int = 0


Stages = Sequence[tuple[Sequence[GradientPlace | None], Sequence[int]]]


def charge(stages: Stages, compact: bool = False) -> list[Charge]:
    """Return what δ_0 to δ_L keep alive.

    Args:
        stages: for stages 1 to L, where the backward leaves each input's gradient, and the bytes of each output's
            gradient by itself.
        compact: whether parts of storages that are passed on are copied.
    """
    L = len(stages)
    alive = {(L, n): size for n, size in enumerate(stages[-1][1])}  # storage -> bytes, at the current boundary
    held: list[tuple[int, int] | None] = list(alive)  # storage of each tensor's gradient
    layouts = [Layout.ALIKE] * len(held)
    charges = [Charge(sum(alive.values()))]
    for i in range(L, 0, -1):
        places = stages[i - 1][0]
        before, held_before = alive, held
        alive, held = {}, []
        for place in places:
            if place is None:
                held.append(None)
                continue
            came = held_before[place.incoming] if place.incoming is not None else None
            storage = came if came is not None else (i, place.storage)
            alive[storage] = before[storage] if came is not None else place.nbytes
            held.append(storage)
        untouched = {place.incoming for place in places if place is not None and place.untouched}
        read = max((one for n, one in enumerate(layouts) if n not in untouched), default=Layout.ALIKE)
        charges[-1] = charges[-1]._replace(layout=read, alike=not any(layouts))
        layouts = [Layout.ALIKE if place is None else place.layout_given(layouts, read) for place in places]
        fresh = sum(size for storage, size in alive.items() if storage not in before)
        copied = _waiting(held, alive, places, *stages[i - 2]) if compact and i > 1 else ()
        for n in copied:
            held[n] = i, ~n
            layouts[n] = Layout.ALIKE
            alive[i, ~n] = stages[i - 2][1][n]
        alive = {storage: alive[storage] for storage in held if storage is not None}
        alone = sum(stages[i - 2][1]) if i > 1 else 0
        places_of = Counter(storage for storage in held if storage is not None)
        shared = sum(alive[storage] for storage, tensors in places_of.items() if tensors > 1)
        size = sum(stages[i - 2][1][n] for n in copied)
        charges.append(Charge(max(sum(alive.values()), alone), shared, copied, size, fresh))
    return charges[::-1]


def _waiting(
    held: Sequence[tuple[int, int] | None],
    alive: Mapping[tuple[int, int], int],
    here: Sequence[GradientPlace | None],
    places: Sequence[GradientPlace | None],
    sizes: Sequence[int],
) -> tuple[int, ...]:
    """Return the tensors whose gradients fill only a part of their storage and are passed on by the next backward. A
    storage may also become partly used when the next backward has used the others, if it does not read the waiting
    ones: only the stage that reads a tensor can copy its gradient.

    Args:
        here: where the gradients of these tensors are left.
        places, sizes: as in `charge`, of the stage that makes these tensors.
    """
    further = {place.incoming for place in places if place is not None}
    unread = {place.incoming for place in places if place is not None and place.untouched}
    found: list[int] = []
    for storage, nbytes in alive.items():
        inside = [n for n, one in enumerate(held) if one == storage]
        if nbytes == sum(sizes[n] for n in inside):
            waiting = [n for n in inside if n in unread] if not further.issuperset(inside) else []
        else:
            waiting = inside if further.intersection(inside) else []
        found += waiting if all(not one.untouched for n in waiting if (one := here[n]) is not None) else []
    return tuple(sorted(found))
