"""In what the plain model's bytes differ from those of its chain with everything kept.

The machine keeps every value until its backward; the plain model lets go in its forward of what autograd does not save,
as soon as its own code does, which may be later than a stage would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ...tensors.stage import Behaviour, StageModule
from .skips import StorageAliasing, handed_on


class FreedEarly(NamedTuple):
    """One storage that nobody saves and the plain model lets go in its forward, where the machine keeps it.

    first, last: of the values that hold it, as of `Skip`. nbytes: of it. until: the stage in whose forward the model's
    own code lets go of it.
    """

    first: int
    last: int
    nbytes: int
    until: int


class HeldLate(NamedTuple):
    """Bytes that are in no value, and that the plain model's own code holds after stage `first` until stage `until`: a
    variable of a forward that is still under way, or what it computes for nothing."""

    first: int
    until: int
    nbytes: int


def find_passing(
    runs: Sequence[tuple[StorageAliasing, Behaviour]], stages: Sequence[StageModule]
) -> tuple[FreedEarly, ...]:
    """The storages that the plain model lets go in its forward; of recorded models, since their code was seen to do so.

    What autograd saves was seen when the stages ran; a stage that may save other tensors another time says nothing.
    """
    until = _ends(stages)
    found = []
    for one in handed_on(runs):
        outputs = stages[one.first - 1].storages
        storage = outputs[one.output] if one.output < len(outputs) else None
        varying = any(behaviour.varying for _, behaviour in runs[one.first - 1 : one.last + 1])
        if storage in until and not (one.saved or one.written or varying):
            found.append(FreedEarly(one.first, one.last, one.nbytes, until[storage]))
    return tuple(found)


def find_returned(runs: Sequence[tuple[StorageAliasing, Behaviour]], others: Collection[int]) -> tuple[FreedEarly, ...]:
    """The storages of the last outputs `others` that nobody saves: they go before the backward where the caller holds
    none of those."""
    L = len(runs)
    return tuple(
        FreedEarly(one.first, L, one.nbytes, L)
        for one in handed_on(runs)
        if one.last == L and set(one.outputs[L]) <= set(others) and not (one.saved or one.written)
    )


def find_lingering(
    prefix: Sequence[StageModule], stages: Sequence[StageModule], rounded: Callable[[int], int]
) -> tuple[HeldLate, ...]:
    """What the plain model holds in its forward longer than the `stages` of a chain do. prefix: those before. rounded:
    what is taken for a number of bytes."""
    until = _ends(stages) | dict.fromkeys((storage for stage in prefix for storage in stage.lives.ends), 0)
    charged = {storage for stage in (*prefix, *stages) for storage in stage.storages if storage is not None}
    found: dict[tuple[int, int], int] = {}
    for i, stage in [*((0, one) for one in prefix), *enumerate(stages, start=1)]:
        longer = [(until.get(span.storage, len(stages)), span.nbytes) for span in stage.lives.outliving(charged)]
        for end, nbytes in [*longer, (i, stage.lives.beside_bytes(charged))]:
            if end > 0 and nbytes:
                found[i - 1, end] = found.get((i - 1, end), 0) + rounded(nbytes)
    return tuple(HeldLate(first, end, nbytes) for (first, end), nbytes in found.items())


def _ends(stages: Sequence[StageModule]) -> dict[int, int]:
    """The stage in whose forward the model lets go of a storage."""
    return {storage: i for i, stage in enumerate(stages, start=1) for storage in stage.lives.ends}
