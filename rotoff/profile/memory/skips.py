"""Storages that several values carry, and the chain in which they are kept in place instead.

A skip connection that crosses cuts is part of every value between its first and last use, and the machine charges it to
each of them, because a value may be offloaded or recomputed alone and takes along what it needs. A skip that is kept in
place stays on the device for the whole step: a constant, subtracted from the limit once. The plain model does that. It
is best if memory is plenty; if memory is scarce, carrying wins, because the skip can then be moved and recomputed. Both
chains come from one measurement, and the planner tries both.
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
    """Which tensors of one run of a stage share storages.

    Attributes:
        outputs: for each output, (bytes of its storage, first input in it or None, first output in it).
        saved: for each saved tensor, (first input in its storage or None, first output or None).
        written: the inputs that the stage changes in place.
        spare: bytes by which the charge while the stage runs, in ``F_all`` and in ``F_ck``, exceeds its need, because
            bytes that it passes on are also charged to its input.
    """

    outputs: tuple[tuple[int, int | None, int], ...]
    saved: tuple[tuple[int | None, int | None], ...]
    written: frozenset[int] = frozenset()
    spare: tuple[int, int] = (0, 0)


def storage_aliasing(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    output_bytes: Sequence[int],
    saved: Sequence[int | None],
    written: Collection[int],
) -> StorageAliasing:
    """Return the aliasing in one run.

    Args:
        output_bytes: of each output's storage, as the allocator counts them.
        saved: the storage of each saved tensor; None if it is freed.
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
    """One storage that several values carry.

    Attributes:
        first: the stage that makes it.
        last: the last stage whose output holds it; the next stage, or the caller, uses it.
        nbytes: its bytes; at an interpolated size, at most those, since they are subtracted from the values.
        outputs: for stages `first` to `last`, the output tensors that lie in it.
        saved: for stages `first` to `last` + 1, the saved tensors that lie in it.
        staying_bytes: its bytes; at an interpolated size, at least those, since they are charged if it stays in place.
    """

    first: int
    last: int
    nbytes: int
    outputs: tuple[tuple[int, ...], ...]
    saved: tuple[tuple[int, ...], ...]
    staying_bytes: int

    @property
    def carried(self) -> int:
        """The number of values that hold it, without the first."""
        return self.last - self.first


class OutputStorage:
    """One storage of outputs while it is followed through the stages.

    Attributes:
        first, last: the stages whose outputs hold it.
        output: its index among the outputs of the first.
        outputs, saved: by stage, the indices of outputs and of saved tensors in it.
        written: whether a stage changes it.
    """

    def __init__(self, first: int, output: int, nbytes: int) -> None:
        self.first = self.last = first
        self.output = output
        self.nbytes = nbytes
        self.outputs: dict[int, list[int]] = {}
        self.saved: dict[int, list[int]] = {}
        self.written = False

    @property
    def is_skip(self) -> bool:
        """Whether several values carry it and no stage changes it."""
        return self.last > self.first and not self.written

    def skip(self) -> Skip:
        stages = range(self.first, self.last + 1)
        outputs = tuple(tuple(self.outputs[i]) for i in stages)
        saved = tuple(tuple(self.saved.get(i, ())) for i in (*stages, self.last + 1))
        return Skip(self.first, self.last, self.nbytes, outputs, saved, self.nbytes)


def find_skips(runs: Sequence[tuple[StorageAliasing, Behaviour]]) -> tuple[Skip, ...]:
    """Return the storages that the outputs of two or more stages hold, in the order in which they are made.

    Storages that a later stage changes in place are left out: a replay of the stage that makes one would change it.
    """
    return tuple(one.skip() for one in output_storages(runs) if one.is_skip)


def output_storages(runs: Sequence[tuple[StorageAliasing, Behaviour]]) -> list[OutputStorage]:
    """Return the storages of outputs, in the order in which they are made."""
    found: list[OutputStorage] = []
    before: list[OutputStorage | None] = []
    for i, (aliasing, behaviour) in enumerate(runs, start=1):
        for n in aliasing.written:
            if n < len(before) and (changed := before[n]) is not None:
                changed.written = True
        now: list[OutputStorage | None] = []
        for n, (nbytes, given, made) in enumerate(aliasing.outputs):
            one: OutputStorage | None = None
            if behaviour.own_outputs[n]:
                if given is not None:
                    one = before[given] if given < len(before) else None
                elif made < n:
                    one = now[made]
                else:
                    one = OutputStorage(i, n, nbytes)
                    one.written = behaviour.varying  # it is unknown which saved tensors lie in it
                    found.append(one)
            if one is not None:
                one.last = i
                one.outputs.setdefault(i, []).append(n)
            now.append(one)
        for n, (given, output) in enumerate(aliasing.saved):
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
    """Return `chain` without the bytes of `skips` in its values; the caller subtracts them from the limit.

    A replay of the stage that makes a skip makes it again and frees this copy at its end. Other stages were charged for
    it twice while they ran, and no longer are. ``B`` of the stage that makes it cannot use its room.

    Args:
        spare: for each stage, `StorageAliasing.spare`.
        staying: for each stage, the bytes that ``B`` needs more if all outputs stay.
    """
    fewer = [0] * len(chain)
    handed = [0] * len(chain)  # the part that the stage did not make
    for skip in skips:
        for i in range(skip.first, skip.last + 1):
            fewer[i - 1] += skip.nbytes
            handed[i - 1] += skip.nbytes if i > skip.first else 0
    rows = zip(chain.stages, fewer, handed, spare, staying, strict=True)
    return replace(chain, stages=tuple(_without(*row) if row[1] else row[0] for row in rows))


def _without(stage: Stage, nbytes: int, handed: int, spare: tuple[int, int], staying: int) -> Stage:
    """Return `stage` with `nbytes` fewer in its values; it passes on `handed` of these and makes the rest."""
    assert stage.checkpoint_transient_bytes is not None
    made = nbytes - handed

    def less(form: Form) -> Form:
        # `spare` and `staying` are unknown for a smaller form
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


def freed_in_place(freed: Sequence[int], skips: Sequence[Skip], staying: Sequence[int]) -> tuple[int, ...]:
    """Return what is left of the `freed` bytes of each ``B`` if `skips` stay in place: a stage never frees those it
    made.

    Args:
        staying: as in `keep_in_place`, which charges it.
    """
    made = [0] * len(freed)
    for skip in skips:
        made[skip.first - 1] += skip.nbytes
    return tuple(max(0, f - max(0, m - more)) for f, m, more in zip(freed, made, staying, strict=True))


def behave_in_place(behaviours: Sequence[Behaviour], skips: Sequence[Skip]) -> tuple[Behaviour, ...]:
    """Return the behaviours of the stages if `skips` are kept in place."""
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
    """Return the sets of `skips`, as indices, worth trying to keep in place: all, those in more than two values, and
    none."""
    everything = tuple(range(len(skips)))
    long = tuple(n for n in everything if skips[n].carried > 1)
    return list(dict.fromkeys([everything, long, ()]))
