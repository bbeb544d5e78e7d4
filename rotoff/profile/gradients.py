"""Bytes of gradients as they really lie: several in one storage, or a part of one that is larger than it.

The backward of a concatenation hands out views of one gradient, and each keeps all of it alive; a stage that passes a value
on passes its gradient on as it lies. So what δ_i holds follows from the stages after i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class GradientPlace(NamedTuple):
    """The storage that holds one gradient. incoming: the output whose gradient it came in with, None for a fresh one."""

    storage: int
    nbytes: int
    incoming: int | None


class Charge(NamedTuple):
    """Bytes that one δ keeps alive. shared: of those, what lies in one storage with another tensor's gradient, and so may stay
    when the first of them has been used."""

    nbytes: int
    shared: int = 0


def charge(stages: Sequence[tuple[Sequence[GradientPlace | None], Sequence[int]]]) -> list[Charge]:
    """What δ_0 to δ_L keep alive.

    Args:
        stages: of stages 1 to L, where the backward leaves each input's gradient, and the bytes of each output's gradient
            by itself.
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
        alone = sum(stages[i - 2][1]) if i > 1 else 0
        places_of = Counter(storage for storage in held if storage is not None)
        shared = sum(lying[storage] for storage, tensors in places_of.items() if tensors > 1)
        charges.append(Charge(max(sum(lying.values()), alone), shared))
    return charges[::-1]
