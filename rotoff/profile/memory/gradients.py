"""Bytes of gradients as they really lie: several in one storage, or a part of one that is larger than it.

The backward of a concatenation hands out views of one gradient, and each keeps all of it alive; a stage that passes a
value on passes its gradient on as it lies. So what δ_i holds follows from the stages after i.

Where a part waits for long, as the gradient of a U-Net's skip connection does, a copy of it lets the rest go: a little
time for many bytes, in every ``B`` until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class GradientPlace(NamedTuple):
    """The storage that holds one gradient. incoming: the output whose gradient it came in with, None for a fresh one.
    strange: whether it is permuted or expanded though the gradients given were contiguous; passed_on: where those were
    permuted."""

    storage: int
    nbytes: int
    incoming: int | None
    strange: bool = False
    passed_on: bool = False


class Charge(NamedTuple):
    """Bytes that one δ keeps alive. shared: of those, what lies in one storage with another tensor's gradient, and so
    may stay when the first of them has been used. copied: the tensors whose gradients are copies; copied_bytes: of
    those. fresh_bytes: what the backward had made before it copied. strange: whether some of it is not contiguous: a
    mean's gradient is expanded, and so may be those before it. Kernels that want it contiguous copy it first."""

    nbytes: int
    shared: int = 0
    copied: tuple[int, ...] = ()
    copied_bytes: int = 0
    fresh_bytes: int = 0
    strange: bool = False


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
        strange = any(p.strange or (p.passed_on and charges[-1].strange) for p in places if p is not None)
        fresh = sum(size for storage, size in lying.items() if storage not in before)
        copied = _waiting(held, lying, *stages[i - 2]) if compact and i > 1 else ()
        for n in copied:
            held[n] = i, ~n
            lying[i, ~n] = stages[i - 2][1][n]
        lying = {storage: lying[storage] for storage in held if storage is not None}
        alone = sum(stages[i - 2][1]) if i > 1 else 0
        places_of = Counter(storage for storage in held if storage is not None)
        shared = sum(lying[storage] for storage, tensors in places_of.items() if tensors > 1)
        size = sum(stages[i - 2][1][n] for n in copied)
        charges.append(Charge(max(sum(lying.values()), alone), shared, copied, size, fresh, strange))
    return charges[::-1]


def _waiting(
    held: Sequence[tuple[int, int] | None],
    lying: Mapping[tuple[int, int], int],
    places: Sequence[GradientPlace | None],
    sizes: Sequence[int],
) -> tuple[int, ...]:
    """Tensors whose gradients fill a part of their storage only, one of which the next backward hands on.

    places, sizes: as in `charge`, of the stage that has these tensors as its outputs.
    """
    further = {place.incoming for place in places if place is not None}
    found: list[int] = []
    for storage, nbytes in lying.items():
        inside = [n for n, one in enumerate(held) if one == storage]
        if nbytes > sum(sizes[n] for n in inside) and further.intersection(inside):
            found += inside
    return tuple(sorted(found))
