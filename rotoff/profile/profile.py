"""What measuring a model gives: its chain, how its stages behave, and the bytes that belong to no value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..core.chain import Chain, Form, Stage
from ..runtime.overhead import NO_UPKEEP, UpkeepTimes
from ..tensors.convolutions import Algorithms
from ..tensors.stage import Behaviour, StageModule
from ..tensors.storage import block_bytes, rounded
from .memory.eager_memory import FreedEarly, HeldLate
from .memory.skips import Skip, behave_in_place, gone_in_place, keep_in_place
from .provenance import UPKEEP_TIMES


class StageForms(NamedTuple):
    """Smaller forms of the stage `name`, as ``F_sel i 1``, ``F_sel i 2``, ... make them.

    forms: their costs. keeps: of each, the tensors that it keeps, as the operations that made them and shapes. reason:
    why there are none. algorithms: of each, by which its convolutions run, where that is not the flags' choice.
    """

    name: str
    forms: tuple[Form, ...]
    keeps: tuple[tuple[str, ...], ...]
    reason: str
    algorithms: tuple[Algorithms | None, ...] = ()


class Compact(NamedTuple):
    """What becomes of the chain where gradients that wait in a part of a larger storage are copied, so that the rest
    can go.

    stages: its costs. copied: of each stage, the inputs whose gradients are. output_retention, freed_before_backward:
    as of `Profile`.
    """

    stages: tuple[Stage, ...]
    copied: tuple[tuple[int, ...], ...]
    output_retention: tuple[int, ...]
    freed_before_backward: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """A measured model. How processes agree on each field `common.RULES` says.

    device: where it was measured. chain: costs of the stages that have a backward. prefix: stages before them, through
    which no gradient flows. stages, behaviours: of the chain. unmanaged_bytes: what autograd keeps past all hooks, and
    autocast of weights, in every step. replay_bytes: the most that snapshots take in a step that runs stages twice.
    prefix_peak_bytes: the most that the prefix holds, its output (the chain's input) included. made_input_bytes: those
    of a_0 that the prefix makes. outside_bytes: of each stage, what the chain charges in its forward for a prefix of
    which the model's own code runs a part there. skips: bytes that several values carry. passing: bytes of values that
    the plain model lets go; returned: of values that it returns and that nobody saves; lingering: others that it holds
    longer. spare_bytes: of each stage, by how much the charge while it runs is above what it takes, as ``F_all`` and as
    ``F_ck`` (`skips.StorageAliasing.spare`). freed_before_backward: of each stage, what the machine
    charges in its ``B`` and is not there: an output, say, that only the next stage's backward needed. output_retention:
    of each stage, what its ``B`` needs more where nothing gives its outputs back. rng_bytes: of one state of the
    generators, on the device. compact: the same with gradients that wait copied, where there are any. copy_bandwidth:
    of those copies, B/s. upkeep_times: what the runtime itself takes (`with_upkeep`). host_bound: of each stage,
    whether the device waits for the host there, so that it does for the runtime too; empty where they are one.
    beside_loss_bytes: of the gradients of what the model returns beside a loss, which a caller may ask for or not.
    twice_bytes: of each stage, those of `unmanaged_bytes` that its values are charged with as well: the plain model has
    them once. cast_bytes: what autocast within the model keeps to the end of its region; saved_cast_bytes: of that,
    what is in the ā of each stage as well. timed: whether it has times, of stages, copies and the runtime, and smaller
    forms. Otherwise these are 0 and none, and it tells only what keeping everything takes.
    """

    device: torch.device
    chain: Chain
    prefix: tuple[StageModule, ...]
    stages: tuple[StageModule, ...]
    behaviours: tuple[Behaviour, ...]
    unmanaged_bytes: int
    replay_bytes: int
    prefix_peak_bytes: int = 0
    made_input_bytes: int = 0
    outside_bytes: tuple[int, ...] = ()
    no_forms: tuple[str, ...] = ()
    rng_bytes: int = 0
    freed_before_backward: tuple[int, ...] = ()
    skips: tuple[Skip, ...] = ()
    passing: tuple[FreedEarly, ...] = ()
    returned: tuple[FreedEarly, ...] = ()
    lingering: tuple[HeldLate, ...] = ()
    spare_bytes: tuple[tuple[int, int], ...] = ()
    output_retention: tuple[int, ...] = ()
    compact: Compact | None = None
    copy_bandwidth: float | None = None
    upkeep_times: UpkeepTimes = NO_UPKEEP
    host_bound: tuple[bool, ...] = ()
    beside_loss_bytes: int = 0
    twice_bytes: tuple[int, ...] = ()
    cast_bytes: int = 0
    saved_cast_bytes: tuple[int, ...] = ()
    timed: bool = True

    def described(self, name: str, meta: Mapping[str, Any]) -> Profile:
        """The same, whose chain has this name and says `meta`, and the times that are not in its stages."""
        times = {UPKEEP_TIMES: self.upkeep_times._asdict()}
        return replace(self, chain=replace(self.chain, name=name, meta={**meta, **times}))

    def keeping(self, kept: Collection[int], compact: bool = False) -> Profile:
        """The same stages where the `skips` of these numbers are kept in place: constants of the step, and in no value.

        compact: whether gradients that wait are copied.
        """
        if compact and self.compact is not None:
            copying = zip(self.behaviours, self.compact.copied, strict=True)
            return replace(
                self,
                chain=replace(self.chain, stages=self.compact.stages),
                behaviours=tuple(replace(one, copied=copied) for one, copied in copying),
                output_retention=self.compact.output_retention,
                freed_before_backward=self.compact.freed_before_backward,
                compact=None,
            ).keeping(kept)
        if not kept:
            return self
        staying = [self.skips[n] for n in sorted(kept)]
        return replace(
            self,
            chain=keep_in_place(self.chain, staying, self.spare_bytes, self.output_retention),
            behaviours=behave_in_place(self.behaviours, staying),
            unmanaged_bytes=self.unmanaged_bytes + self.kept_bytes(kept),
            freed_before_backward=gone_in_place(self.freed_before_backward, staying, self.output_retention),
            skips=(),
            compact=None,
        )

    def with_upkeep(self) -> Profile:
        """The same stages as a planned step runs them, with what the runtime takes; on CUDA, where the host is what
        they wait for."""
        bound = self.host_bound or (True,) * len(self.chain)
        rows = zip(self.chain.stages, self.behaviours, bound, strict=True)
        stages = tuple(self.upkeep_times.added_to(s, len(b.saved)) if host else s for s, b, host in rows)
        return replace(self, chain=replace(self.chain, stages=stages), upkeep_times=NO_UPKEEP)

    @property
    def resident_input_bytes(self) -> int:
        """Bytes of a_0 that were there before the step: all of it, or what a prefix hands on of the batch."""
        return self.chain.input_bytes - self.made_input_bytes

    def kept_bytes(self, kept: Collection[int]) -> int:
        """Bytes of the `skips` of these numbers."""
        return sum(self.skips[n].nbytes for n in kept)

    @property
    def forms(self) -> tuple[StageForms, ...]:
        """Of each stage its smaller forms and what they keep, or why it has none."""
        reasons = self.no_forms or ("",) * len(self.stages)
        rows = zip(self.chain.stages, self.behaviours, reasons, strict=True)
        return tuple(
            StageForms(s.name, s.forms, tuple(r.keeps for r in b.forms), why, tuple(r.algorithms for r in b.forms))
            for s, b, why in rows
        )

    def replay_extra(self, replayed: Collection[int]) -> dict[int, int]:
        """What `replay_bytes` is where just the stages in `replayed` run twice: bytes held while each does."""
        behaviours = {i: self.behaviours[i - 1] for i in replayed}
        return {
            i: 2 * self.rng_bytes + sum(buffer_bytes(b)) + b.unmanaged_bytes + b.cast_bytes
            for i, b in behaviours.items()
        }

    @property
    def snapshot_bytes(self) -> int:
        """What a planned step holds throughout: copies of the buffers that forwards change, as they were before, and
        what autocast within the model keeps."""
        return sum(sum(buffer_bytes(b)) for b in self.behaviours) + self.cast_bytes


def replay_bytes(behaviours: Sequence[Behaviour], rng_bytes: int) -> int:
    """What replays hold beside values: the clones of buffers that one replay at a time runs on, states of generators as
    they are put, and what its graph keeps past all hooks and autocast of its weights, beside what that of the first run
    does."""
    return max(sum(buffer_bytes(b)) + b.unmanaged_bytes + b.cast_bytes for b in behaviours) + 2 * rng_bytes


def buffer_bytes(behaviour: Behaviour) -> list[int]:
    """Of each buffer that the forward changes, what a copy of it takes; and of other tensors that it sets, what those
    before take."""
    found = (module._buffers[name] for module, name in behaviour.changed_buffers)
    copies = [rounded(buffer.nbytes, block_bytes(buffer.device)) for buffer in found if buffer is not None]
    return copies + [nbytes for _, _, nbytes in behaviour.changed_attributes if nbytes]
