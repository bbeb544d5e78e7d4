"""The result of measuring a model: its chain, how its stages behave, and the bytes that belong to no value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerator import block_bytes
from ..capture.partition.weight_casts import CastRegion
from ..core.chain import Chain, Form, Stage
from ..core.parameters import ParameterGroup
from ..runtime.overhead import NO_OVERHEAD, OverheadTimes
from ..tensors.convolutions import Algorithms
from ..tensors.stage import Behaviour, StageModule
from ..tensors.storage import rounded
from .memory.eager_memory import FreedEarly, HeldLate
from .memory.skips import Skip, behave_in_place, freed_in_place, keep_in_place
from .provenance import OVERHEAD_TIMES


class StageForms(NamedTuple):
    """The smaller forms of the stage `name`, which ``F_sel i 1``, ``F_sel i 2``, ... make.

    Attributes:
        forms: their costs.
        keeps: for each, the tensors that it keeps, as the operation that made it and a shape.
        reason: why there are none; empty if there are some.
        algorithms: for each, the algorithms of its convolutions; None if the flags choose them.
    """

    name: str
    forms: tuple[Form, ...]
    keeps: tuple[tuple[str, ...], ...]
    reason: str
    algorithms: tuple[Algorithms | None, ...] = ()


class Compact(NamedTuple):
    """Changes to the chain if waiting gradients that fill a part of a larger storage are copied, so that the storage is
    freed.

    Attributes:
        stages: the costs.
        copied: for each stage, the inputs whose gradients are copied.
        output_retention, freed_before_backward: as in `Profile`.
    """

    stages: tuple[Stage, ...]
    copied: tuple[tuple[int, ...], ...]
    output_retention: tuple[int, ...]
    freed_before_backward: tuple[int, ...]


class PlacedBackward(NamedTuple):
    """The ``B`` of a stage if the machine charges the gradients of parameters.

    Attributes:
        spare: bytes of these that do not come on top of the stage's transient bytes.
        freed: bytes by which ``B`` then stays below what the machine charges (`Profile.freed_before_backward`).
        waiting: bytes of these in the stage's `grad_bytes`.
    """

    spare: int
    freed: int
    waiting: int = 0


@dataclass(frozen=True)
class Profile:
    """A measured model. `reduction.RULES` says how processes agree on each field. Tuples have an entry for each stage.

    Attributes:
        device: on which it was measured.
        chain: the costs of the stages that have a backward.
        prefix: the stages before them, through which no gradient flows.
        stages, behaviours: of the chain.
        unmanaged_bytes: what autograd keeps out of reach of hooks, and autocast's casts of weights, in every step.
        replay_bytes: the most that snapshots take in a step that runs stages twice.
        prefix_peak_bytes: the peak of the prefix, including its output (the chain's input).
        made_input_bytes: the part of a_0 that the prefix makes.
        batch_bytes: of the model's input.
        outside_bytes: what the chain charges in a stage's forward for a prefix that the model's code partly runs there.
        no_forms: why the stage has no smaller forms.
        rng_bytes: of one state of the generators, on the device.
        freed_before_backward: what the machine charges in ``B`` although it is freed, such as an output that only the
            next stage's backward needs.
        skips: storages that several values carry.
        freed_early: storages that the plain model frees in its forward.
        returned: storages that the model returns and nobody saves.
        held_late: storages that the plain model holds longer than the chain does.
        placed: changes to each ``B`` if the chain has parameters (`placing`).
        spare_bytes: how much the charge while a stage runs exceeds its need, in ``F_all`` and ``F_ck``
            (`skips.StorageAliasing.spare`).
        output_retention: what ``B`` needs more if its outputs are not freed.
        compact: the changes if waiting gradients are copied; None if none wait.
        copy_bandwidth: of those copies, B/s.
        overhead_times: the interpreter's overhead (`with_overhead`).
        host_bound: whether the device waits for the host in the stage, so that overhead costs time; empty if host and
            device are one.
        beside_loss_bytes: of the gradients of what the model returns beside a loss; a caller may or may not ask for
            them.
        twice_bytes: the part of `unmanaged_bytes` that is also charged to the stage's values; the plain model holds it
            once.
        casts: what autocast within the model keeps to the end of each of its regions.
        cast_again: (module, name) of the parameters of which autocast uses one cast more than once.
        formed_for: the limit for which forms were measured, as text; empty if all forms were.
        timed: whether times of stages, copies and the interpreter, and smaller forms, were measured; if not, the
            profile only says what keeping everything takes.
        alike: whether all gradients that the stage's backward receives had the layouts of their tensors.
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
    batch_bytes: int = 0
    outside_bytes: tuple[int, ...] = ()
    no_forms: tuple[str, ...] = ()
    rng_bytes: int = 0
    freed_before_backward: tuple[int, ...] = ()
    placed: tuple[PlacedBackward, ...] = ()
    skips: tuple[Skip, ...] = ()
    freed_early: tuple[FreedEarly, ...] = ()
    returned: tuple[FreedEarly, ...] = ()
    held_late: tuple[HeldLate, ...] = ()
    spare_bytes: tuple[tuple[int, int], ...] = ()
    output_retention: tuple[int, ...] = ()
    compact: Compact | None = None
    copy_bandwidth: float | None = None
    overhead_times: OverheadTimes = NO_OVERHEAD
    host_bound: tuple[bool, ...] = ()
    beside_loss_bytes: int = 0
    twice_bytes: tuple[int, ...] = ()
    casts: tuple[CastRegion, ...] = ()
    cast_again: frozenset[tuple[nn.Module, str]] = frozenset()
    formed_for: str = ""
    timed: bool = True
    alike: tuple[bool, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether times and all smaller forms were measured."""
        return self.timed and not self.formed_for

    def described(self, name: str, meta: Mapping[str, Any]) -> Profile:
        """Return this with the chain's name and `meta`, to which the overhead times are added."""
        times = {OVERHEAD_TIMES: self.overhead_times._asdict()}
        return replace(self, chain=replace(self.chain, name=name, meta={**meta, **times}))

    def letting_go(self) -> Profile:
        """Return this for a caller that drops before the backward what the model returns beside its loss: no value
        holds what the last stage makes of it. What earlier stages make of it stays charged, since replays read it."""
        nbytes = sum(one.nbytes for one in self.returned if one.first == len(self.chain))

        def less(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
            last = stages[-1]
            assert last.checkpoint_transient_bytes is not None
            last = replace(
                last,
                output_bytes=last.output_bytes - nbytes,
                saved_bytes=last.saved_bytes - nbytes,
                forward_transient_bytes=last.forward_transient_bytes + nbytes,
                checkpoint_transient_bytes=last.checkpoint_transient_bytes + nbytes,
            )
            return (*stages[:-1], last)

        if not nbytes or self.chain.stages[-1].forms:
            return self
        return replace(
            self,
            chain=replace(self.chain, stages=less(self.chain.stages)),
            compact=self.compact and self.compact._replace(stages=less(self.compact.stages)),
        )

    def keeping(self, kept: Collection[int], compact: bool = False, lets_go: bool = False) -> Profile:
        """Return this with the `skips` of the indices `kept` kept in place: they are a constant of the step, and in no
        value.

        Args:
            compact: whether waiting gradients are copied.
            lets_go: as for `letting_go`.
        """
        if lets_go:
            return self.letting_go().keeping(kept, compact)
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
            freed_before_backward=freed_in_place(self.freed_before_backward, staying, self.output_retention),
            skips=(),
            compact=None,
        )

    def placing(self, parameters: tuple[ParameterGroup, ...]) -> Profile:
        """Return this for steps that move `parameters`; their gradients are then charged by the machine."""

        def charged(one: Any, spare: int) -> Any:
            return replace(one, backward_transient_bytes=max(0, one.backward_transient_bytes - spare))

        stages = []
        for stage, behaviour, placed in zip(self.chain.stages, self.behaviours, self.placed, strict=True):
            # with other algorithms, the peak may be elsewhere
            # on CUDA, gradients of earlier stages may stay while a thread of the host updates
            whole = placed.spare if self.device.type == "cpu" else 0
            spare = [whole if recipe.algorithms is None else 0 for recipe in behaviour.forms]
            forms = tuple(map(charged, stage.forms, spare))
            assert stage.grad_bytes is not None
            grad_bytes = stage.grad_bytes - placed.waiting
            stages.append(replace(charged(stage, whole), forms=forms, grad_bytes=grad_bytes))
        return replace(
            self,
            chain=replace(self.chain, stages=tuple(stages), parameters=parameters),
            freed_before_backward=tuple(one.freed for one in self.placed),
            placed=tuple(one._replace(waiting=0) for one in self.placed),  # no longer in `grad_bytes`
        )

    def with_overhead(self) -> Profile:
        """Return this with the interpreter's overhead in the stages' times; on CUDA, only in stages that wait for the
        host."""
        bound = self.host_bound or (True,) * len(self.chain)
        rows = zip(self.chain.stages, self.behaviours, bound, strict=True)
        stages = tuple(self.overhead_times.added_to(s, len(b.saved)) if host else s for s, b, host in rows)
        return replace(self, chain=replace(self.chain, stages=stages), overhead_times=NO_OVERHEAD)

    @property
    def cast_bytes(self) -> int:
        """The most that a region of autocast within the model keeps to its end."""
        return max((one.nbytes for one in self.casts), default=0)

    @property
    def resident_input_bytes(self) -> int:
        """The bytes of a_0 that exist before the step: all of them, or what the prefix passes on from the batch."""
        return self.chain.input_bytes - self.made_input_bytes

    def kept_bytes(self, kept: Collection[int]) -> int:
        """Return the bytes that the `skips` of the indices `kept` take in place."""
        return sum(self.skips[n].staying_bytes for n in kept)

    @property
    def forms(self) -> tuple[StageForms, ...]:
        """The smaller forms of each stage and what they keep, or why it has none."""
        reasons = self.no_forms or ("",) * len(self.stages)
        rows = zip(self.chain.stages, self.behaviours, reasons, strict=True)
        return tuple(
            StageForms(s.name, s.forms, tuple(r.keeps for r in b.forms), why, tuple(r.algorithms for r in b.forms))
            for s, b, why in rows
        )

    def replay_extra(self, replayed: Collection[int]) -> dict[int, int]:
        """Return, for each stage in `replayed`, the bytes that snapshots take while it is replayed; `replay_bytes` of
        these stages."""
        behaviours = {i: self.behaviours[i - 1] for i in replayed}
        return {
            i: self.rng_bytes + sum(buffer_bytes(b)) + b.unmanaged_bytes + b.cast_bytes for i, b in behaviours.items()
        }

    @property
    def snapshot_bytes(self) -> int:
        """What a planned step holds throughout: copies of the buffers, and of the batch, that forwards change, and
        autocast's casts within the model."""
        return sum(sum(buffer_bytes(b)) for b in self.behaviours) + self.cast_bytes


def replay_bytes(behaviours: Sequence[Behaviour], rng_bytes: int) -> int:
    """Return what replays hold beside values: clones of buffers for one replay at a time, a state of the generators,
    and what its graph keeps out of reach of hooks and autocast's casts of its weights."""
    return max(sum(buffer_bytes(b)) + b.unmanaged_bytes + b.cast_bytes for b in behaviours) + rng_bytes


def buffer_bytes(behaviour: Behaviour) -> list[int]:
    """Return the bytes of a copy of each buffer that the forward changes, of the earlier values of other tensors it
    sets, and of inputs that it changes."""
    found = (module._buffers[name] for module, name in behaviour.changed_buffers)
    copies = [rounded(buffer.nbytes, block_bytes(buffer.device)) for buffer in found if buffer is not None]
    changed = [*(nbytes for _, _, nbytes in behaviour.changed_attributes), behaviour.overwritten_bytes]
    return copies + [nbytes for nbytes in changed if nbytes]
