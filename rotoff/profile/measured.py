"""What measuring one stage gives: the result of one forward that keeps everything, and of all measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.chain import Stage
from ..tensors.stage import Behaviour, StageModule
from .memory.allocator import AllocationLog
from .memory.backward_memory import Levels
from .memory.gradients import GradientPlace
from .memory.skips import StorageAliasing
from .timing.harness import MakeGradients
from .timing.stage_timing import Timings


@dataclass(frozen=True)
class Forward:
    """The result of a forward that keeps everything.

    Attributes:
        layouts: make gradients of the outputs in layouts other than theirs.
        output_bytes, saved_bytes: of a_i and ā_i.
        carried_bytes: the part of both that lies in the input's storages.
        own_gradient_bytes, aliasing: as in `Measured`.
        behaviour: as far as this run shows it.
        shapes: (shape, dtype) of each tensor that autograd saved.
        log: the allocator's events.
    """

    layouts: tuple[MakeGradients, ...]
    output_bytes: int
    saved_bytes: int
    carried_bytes: int
    own_gradient_bytes: tuple[int, ...]
    aliasing: StorageAliasing
    behaviour: Behaviour
    shapes: list[tuple[torch.Size, torch.dtype]]
    log: AllocationLog


@dataclass(frozen=True)
class Measured:
    """The costs of a stage for the chain, and its behaviour for the runtime.

    The costs count each gradient by itself; `gradients.charge` handles those that share a storage or lie in a larger
    one. `backward_transient_bytes`, also of the forms, is therefore the peak of the backward above ā_i and δ_i; how
    much of it is δ_{i-1} follows from that charge.

    Attributes:
        gradients: where the backward leaves the gradient of each input tensor; None if there is none.
        own_gradient_bytes: of each output tensor's gradient by itself; 0 if there is none.
        aliasing: which tensors share storages.
        levels, staying: of the backward, as in `BackwardBytes`.
        other_layout_bytes: what the backward holds more if it receives gradients in another layout than their tensors'.
        adding: numbers of the parameters whose gradients it adds to those of later stages. waiting: of those whose
            gradients wait for parts from earlier stages.
        held_bytes: what stays whatever a plan drops (`dropped`).
        holds_others: whether inputs or outputs are among those.
        no_forms: why the stage has no smaller forms; empty if it has some.
        casts: the casts of weights that autocast keeps (`casts.kept_casts`).
        timings: shared by all stages of the same kind, also by those not measured yet; None if the times were known.
        host_bound: whether the device waits for the host in this stage.
        carried_bytes: as in `Forward`.
        kind: equal for stages of which one measurement serves all; None if each must be measured.
        collective: as in `Run`.
    """

    costs: Stage
    behaviour: Behaviour
    gradients: tuple[GradientPlace | None, ...]
    own_gradient_bytes: tuple[int, ...]
    aliasing: StorageAliasing
    levels: tuple[Levels, ...]
    staying: tuple[Levels, ...]
    other_layout_bytes: int = 0
    adding: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    held_bytes: int = 0
    holds_others: bool = False
    no_forms: str = ""
    casts: Mapping[int, int] = field(default_factory=dict)
    timings: Timings | None = None
    host_bound: bool = False
    carried_bytes: int = 0
    kind: Any = None
    collective: bool = False

    @property
    def backward_peak(self) -> int:
        """The most bytes of the backward above ā and δ_i once the outputs are freed; may be negative."""
        return max(one.peak() for one in self.levels)

    @property
    def holds_for_its_kind(self) -> bool:
        """Whether stages that do the same on inputs of the same layout need no measurement of their own."""
        behaviour = self.behaviour
        fresh = all(
            mine or given is not None
            for mine, (_, given, _) in zip(behaviour.own_outputs, self.aliasing.outputs, strict=True)
        )
        return fresh and not (behaviour.varying or behaviour.changed_attributes or self.casts or self.holds_others)

    def of(self, stage: StageModule, like: StageModule) -> Measured:
        """Return this measurement of `like` for `stage`, which is of the same kind."""
        own = dict(zip(like.buffers_read(), stage.buffers_read(), strict=True))
        changed = tuple(own[buffer] for buffer in self.behaviour.changed_buffers)
        behaviour = replace(self.behaviour, modes=stage.modes(), changed_buffers=changed)
        return replace(self, costs=replace(self.costs, name=stage.name), behaviour=behaviour)

    def with_times_of(self, other: Measured) -> Measured:
        """Return this with the times and smaller forms of `other`, a stage of the same kind."""
        times, forms = other.costs, other.behaviour
        return replace(
            self,
            costs=replace(
                self.costs,
                forward_time=times.forward_time,
                backward_time=times.backward_time,
                tail_time=times.tail_time,
                forms=times.forms,
            ),
            behaviour=replace(self.behaviour, forms=forms.forms, early_stop=forms.early_stop),
            no_forms=other.no_forms,
            timings=other.timings,
            host_bound=other.host_bound,
        )

    def without_forms(self, why: str) -> Measured:
        """Return this without smaller forms, and `why` there are none unless that is known."""
        costs, behaviour = replace(self.costs, forms=()), replace(self.behaviour, forms=())
        return replace(self, costs=costs, behaviour=behaviour, no_forms=self.no_forms or why)

    def timed(self) -> Measured:
        """Return this with the times of all stages of its kind, once they are measured."""
        if self.timings is None:
            return self
        forward, backward, tail = self.timings.medians()
        costs, more = self.costs, backward - self.costs.backward_time
        forms = tuple(replace(form, backward_time=max(0.0, form.backward_time + more)) for form in costs.forms)
        costs = replace(costs, forward_time=forward, backward_time=backward, tail_time=tail, forms=forms)
        return replace(self, costs=costs, host_bound=self.timings.host_bound)
