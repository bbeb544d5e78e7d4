"""Where the bytes of the plain model differ from those of its chain with everything kept.

The machine keeps every value until its backward. The plain model frees what autograd does not save in its forward, when
its code releases it, which may be later than the end of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ...tensors.stage import Behaviour, StageModule
from .skips import StorageAliasing, output_storages


class FreedEarly(NamedTuple):
    """A storage that nobody saves and that the plain model frees in its forward, while the machine keeps it.

    Attributes:
        first, last: the values that hold it, as in `Skip`.
        nbytes: its bytes.
        until: the stage in whose forward the model's own code releases it.
    """

    first: int
    last: int
    nbytes: int
    until: int


class HeldLate(NamedTuple):
    """Bytes in no value that the plain model holds after stage `first` until stage `until`: a local variable of a
    forward that is still running, or a result that nobody uses."""

    first: int
    until: int
    nbytes: int


def find_freed_early(
    runs: Sequence[tuple[StorageAliasing, Behaviour]], stages: Sequence[StageModule]
) -> tuple[FreedEarly, ...]:
    """Return the storages that the plain model frees in its forward, as seen when the model was recorded.

    Which tensors autograd saves was seen when the stages ran; a stage that saves other tensors each time is left out.
    """
    until = _released_in(stages)
    found = []
    for one in output_storages(runs):
        outputs = stages[one.first - 1].storages
        storage = outputs[one.output] if one.output < len(outputs) else None
        varying = any(behaviour.varying for _, behaviour in runs[one.first - 1 : one.last + 1])
        if storage in until and not (one.saved or one.written or varying):
            found.append(FreedEarly(one.first, one.last, one.nbytes, until[storage]))
    return tuple(found)


def find_returned(runs: Sequence[tuple[StorageAliasing, Behaviour]], others: Collection[int]) -> tuple[FreedEarly, ...]:
    """Return the storages that only the last outputs `others` hold and nobody saves. They are freed before the backward
    if the caller holds none of those outputs."""
    L = len(runs)
    return tuple(
        FreedEarly(one.first, L, one.nbytes, L)
        for one in output_storages(runs)
        if one.last == L and set(one.outputs[L]) <= set(others) and not (one.saved or one.written)
    )


def find_held_late(
    prefix: Sequence[StageModule], stages: Sequence[StageModule], rounded: Callable[[int], int]
) -> tuple[HeldLate, ...]:
    """Return what the plain model holds longer in its forward than the chain of `stages` does.

    Args:
        prefix: the stages before the chain.
        rounded: returns the bytes that the allocator takes for a number of bytes.
    """
    until = _released_in(stages) | dict.fromkeys((storage for stage in prefix for storage in stage.lives.ends), 0)
    charged = {storage for stage in (*prefix, *stages) for storage in stage.storages if storage is not None}
    found: dict[tuple[int, int], int] = {}
    for i, stage in [*((0, one) for one in prefix), *enumerate(stages, start=1)]:
        longer = [(until.get(span.storage, len(stages)), span.nbytes) for span in stage.lives.outliving(charged)]
        for end, nbytes in [*longer, (i, stage.lives.beside_bytes(charged))]:
            if end > 0 and nbytes:
                found[i - 1, end] = found.get((i - 1, end), 0) + rounded(nbytes)
    return tuple(HeldLate(first, end, nbytes) for (first, end), nbytes in found.items())


def _released_in(stages: Sequence[StageModule]) -> dict[int, int]:
    """Return the stage in whose forward the model releases each storage."""
    return {storage: i for i, stage in enumerate(stages, start=1) for storage in stage.lives.ends}
