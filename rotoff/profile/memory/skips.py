"""Bytes that several values carry, and the chain in which they are kept in place instead.

A skip connection that crosses cuts is part of every value between its making and its use, and the machine charges it to
each (a value may go alone to the host or be made again, and takes along what it needs). Kept in place, a skip stays on
the device for the whole step: it is a constant, taken off the limit once, and the values pass it by. Where memory is
plenty that is what the plain model does; where it is scarce, carrying wins, for then it can be moved and recomputed. So
both are chains of the same stages, made from one measurement, and the planner asks for both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...core.chain import Chain, Form, Stage
from ...tensors.stage import Behaviour, SavedKind
from ...tensors.storage import storage_key


class StorageAliasing(NamedTuple):
    """In which storages the tensors of one run of a stage lie.

    outputs: of each output tensor, (bytes of its storage, the first input in that storage or None, the first output in
    it). saved: of each tensor that autograd saves, (the first input in its storage or None, the first output or None).
    written: the inputs that the stage changed in place. spare: bytes by which what is charged while the stage runs, as
    ``F_all`` and as ``F_ck``, is above what it takes, since bytes that it hands on are charged to its input as well.
    """

    outputs: tuple[tuple[int, int | None, int], ...]
    saved: tuple[tuple[int | None, int | None], ...]
    written: frozenset[int] = frozenset()
    spare: tuple[int, int] = (0, 0)


def lying(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    output_bytes: Sequence[int],
    saved: Sequence[int | None],
    written: Collection[int],
) -> StorageAliasing:
    """How the tensors of a run lie.

    output_bytes: of each output's storage, as the device's allocator counts them. saved: the storage of each tensor
    saved, None for one that is gone.
    """
    given, made = _first(inputs), _first(outputs)
    sizes = zip(map(storage_key, outputs), output_bytes, strict=True)
    of_outputs = tuple((size, given.get(key), made[key]) for key, size in sizes)
    of_saved = tuple((None, None) if key is None else (given.get(key), made.get(key)) for key in saved)
    return StorageAliasing(of_outputs, of_saved, frozenset(written))


def _first(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    found: dict[int, int] = {}
    for n, tensor in enumerate(tensors):
        found.setdefault(storage_key(tensor), n)
    return found


@dataclass(frozen=True)
class Skip:
    """One storage that values carry on.

    first: the stage that makes it. last: the last whose output holds it; the next one uses it, or the caller does.
    nbytes: of it. outputs: of stages `first` to `last`, which output tensors lie in it. saved: of stages `first` to
    `last` + 1, which of the tensors that autograd saves do.
    """

    first: int
    last: int
    nbytes: int
    outputs: tuple[tuple[int, ...], ...]
    saved: tuple[tuple[int, ...], ...]

    @property
    def carried(self) -> int:
        """Values that hold it beyond the first."""
        return self.last - self.first


class Found:
    """One storage of outputs, while it is followed. first, last: of the stages whose outputs hold it. output: its
    number among those of the first. saved: by stage, the numbers of the tensors in it that autograd saves. written:
    whether a stage changes it."""

    def __init__(self, first: int, output: int, nbytes: int) -> None:
        self.first = self.last = first
        self.output = output
        self.nbytes = nbytes
        self.outputs: dict[int, list[int]] = {}
        self.saved: dict[int, list[int]] = {}
        self.written = False

    @property
    def is_skip(self) -> bool:
        """Whether several values carry it, and nobody changes it."""
        return self.last > self.first and not self.written

    def skip(self) -> Skip:
        stages = range(self.first, self.last + 1)
        saved = tuple(tuple(self.saved.get(i, ())) for i in (*stages, self.last + 1))
        return Skip(self.first, self.last, self.nbytes, tuple(tuple(self.outputs[i]) for i in stages), saved)


def find_skips(runs: Sequence[tuple[StorageAliasing, Behaviour]]) -> tuple[Skip, ...]:
    """The storages that the outputs of two stages or more hold, in the order of their making.

    Those that a later stage changes in place are left out: a replay of their making would find them changed.
    """
    return tuple(one.skip() for one in handed_on(runs) if one.is_skip)


def handed_on(runs: Sequence[tuple[StorageAliasing, Behaviour]]) -> list[Found]:
    """The storages of outputs, in the order of their making."""
    found: list[Found] = []
    before: list[Found | None] = []
    for i, (lies, behaviour) in enumerate(runs, start=1):
        for n in lies.written:
            if n < len(before) and (changed := before[n]) is not None:
                changed.written = True
        now: list[Found | None] = []
        for n, (nbytes, given, made) in enumerate(lies.outputs):
            one: Found | None = None
            if behaviour.own_outputs[n]:
                if given is not None:
                    one = before[given] if given < len(before) else None
                elif made < n:
                    one = now[made]
                else:
                    one = Found(i, n, nbytes)
                    one.written = behaviour.varying  # which of the tensors that it saves lie there is not known
                    found.append(one)
            if one is not None:
                one.last = i
                one.outputs.setdefault(i, []).append(n)
            now.append(one)
        for n, (given, output) in enumerate(lies.saved):
            one = None
            if given is not None:
                one = before[given] if given < len(before) else None
            elif output is not None:
                one = now[output]
            if one is not None:
                one.saved.setdefault(i, []).append(n)
        before = now
    return found


def keep_in_place(
    chain: Chain, skips: Sequence[Skip], spare: Sequence[tuple[int, int]], staying: Sequence[int]
) -> Chain:
    """`chain` with the bytes of `skips` in no value; they are to be taken off the limit.

    A replay of the stage that makes one makes it anew, beside the one that stays, and lets it go at its end. In the
    others those bytes were charged twice while the stage ran, and are so no more. Its ``B`` cannot use their room once
    they have no reader left.

    Args:
        spare: of each stage, `StorageAliasing.spare`. staying: of each, the bytes that its ``B`` needs more where all
            outputs stay.
    """
    fewer = [0] * len(chain)
    handed = [0] * len(chain)  # of those, what the stage did not make
    for skip in skips:
        for i in range(skip.first, skip.last + 1):
            fewer[i - 1] += skip.nbytes
            handed[i - 1] += skip.nbytes if i > skip.first else 0
    rows = zip(chain.stages, fewer, handed, spare, staying, strict=True)
    return replace(chain, stages=tuple(_without(*row) if row[1] else row[0] for row in rows))


def _without(stage: Stage, nbytes: int, handed: int, spare: tuple[int, int], staying: int) -> Stage:
    """`stage` with `nbytes` less in its values, of which it only hands on `handed`."""
    assert stage.checkpoint_transient_bytes is not None and stage.backward_transient_bytes is not None
    made = nbytes - handed

    def less(form: Form) -> Form:
        assert form.forward_transient_bytes is not None and form.backward_transient_bytes is not None
        # what a smaller form spares, and needs more where outputs stay, is not known
        return replace(
            form,
            saved_bytes=form.saved_bytes - nbytes,
            forward_transient_bytes=form.forward_transient_bytes + nbytes,
            backward_transient_bytes=form.backward_transient_bytes + made,
        )

    return replace(
        stage,
        output_bytes=stage.output_bytes - nbytes,
        saved_bytes=stage.saved_bytes - nbytes,
        forward_transient_bytes=stage.forward_transient_bytes + made + max(0, handed - spare[0]),
        checkpoint_transient_bytes=stage.checkpoint_transient_bytes + made + max(0, handed - spare[1]),
        backward_transient_bytes=stage.backward_transient_bytes + min(made, staying),
        forms=tuple(less(form) for form in stage.forms),
    )


def gone_in_place(gone: Sequence[int], skips: Sequence[Skip], staying: Sequence[int]) -> tuple[int, ...]:
    """Of each stage, what `gone` bytes of its ``B`` are left where `skips` stay in place: it never lets go of those
    that it made.

    Args:
        staying: as of `keep_in_place`, which charges it.
    """
    made = [0] * len(gone)
    for skip in skips:
        made[skip.first - 1] += skip.nbytes
    return tuple(max(0, g - max(0, m - more)) for g, m, more in zip(gone, made, staying, strict=True))


def behave_in_place(behaviours: Sequence[Behaviour], skips: Sequence[Skip]) -> tuple[Behaviour, ...]:
    found = list(behaviours)
    for skip in skips:
        for i, outputs in enumerate(skip.outputs, start=skip.first):
            one = found[i - 1]
            own = tuple(mine and n not in outputs for n, mine in enumerate(one.own_outputs))
            found[i - 1] = replace(one, own_outputs=own, kept=tuple(sorted({*one.kept, *outputs})))
        for i, saved in enumerate(skip.saved, start=skip.first):
            if saved:  # the caller is no stage
                one = found[i - 1]
                kinds = tuple(SavedKind.KEPT if n in saved else kind for n, kind in enumerate(one.saved))
                found[i - 1] = replace(one, saved=kinds)
    return tuple(found)


def choices(skips: Sequence[Skip]) -> list[tuple[int, ...]]:
    """Which of `skips`, by number, it may pay to keep: none, all, and only those that more than two values hold."""
    everything = tuple(range(len(skips)))
    long = tuple(n for n in everything if skips[n].carried > 1)
    return list(dict.fromkeys([everything, long, ()]))
