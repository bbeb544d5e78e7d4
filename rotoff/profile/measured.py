"""What measuring one stage gives: of the forward that keeps everything, and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.chain import Stage
from ..tensors.stage import Behaviour, StageModule
from .memory.allocator import AllocationLog
from .memory.gradients import GradientPlace
from .memory.skips import StorageAliasing
from .timing.stage_timing import Timings


@dataclass(frozen=True)
class Forward:
    """What a forward that keeps everything leaves behind.

    outputs: detached; empty tensors for the last stage. output_bytes, saved_bytes: of a_i and ā_i; carried_bytes: of
    those, what lies in the input's storages and is charged to the output too. own_gradient_bytes, lies: as of
    `Measured`. behaviour: as far as this run shows it. shapes: of what autograd saved.
    """

    outputs: list[torch.Tensor]
    output_bytes: int
    saved_bytes: int
    carried_bytes: int
    own_gradient_bytes: tuple[int, ...]
    lies: StorageAliasing
    behaviour: Behaviour
    shapes: list[tuple[torch.Size, torch.dtype]]
    log: AllocationLog


@dataclass(frozen=True)
class Measured:
    """Costs of a stage for the chain, and its behaviour for the runtime.

    The costs count gradients one by one; those that share or outgrow their bytes are `gradients.charge`'s business. So
    `backward_transient_bytes`, of the forms too, are the most that the backward holds above ā_i and δ_i: what of it is
    δ_{i-1} follows from that charge.

    gradients: where the backward leaves the gradient of each input tensor; None for those without.
    own_gradient_bytes: of each output tensor's gradient by itself, 0 for those without.
    lies: which tensors share storages.
    begun_bytes, output_retention: of the backward, as of `BackwardBytes`.
    other_layout_bytes: what the backward holds more where gradients are given that lie otherwise than their tensors.
    grad_accumulation_bytes: what it holds more where a gradient of a parameter of its own is added to a waiting part.
    held_bytes: what stays whatever is dropped (`dropped`).
    holds_others: whether its inputs or outputs are among that.
    no_forms: why the stage has no smaller forms, if so.
    casts: what autocast keeps of its weights (`casts.kept_casts`).
    timings: of the stages of its kind, in which those that come later are still missing; None where the times were
        known.
    host_bound: whether the device waits for the host there.
    carried_bytes: as of `Forward`.
    kind: what stages that need no measuring of their own have in common; None where each needs it.
    collective: as of `Run`.
    """

    costs: Stage
    behaviour: Behaviour
    gradients: tuple[GradientPlace | None, ...]
    own_gradient_bytes: tuple[int, ...]
    lies: StorageAliasing
    begun_bytes: int
    output_retention: int
    other_layout_bytes: int = 0
    grad_accumulation_bytes: int = 0
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
    def holds_for_its_kind(self) -> bool:
        """Whether stages that do the same on inputs that lie alike need no measuring of their own."""
        behaviour = self.behaviour
        fresh = all(
            mine or given is not None
            for mine, (_, given, _) in zip(behaviour.own_outputs, self.lies.outputs, strict=True)
        )
        return fresh and not (behaviour.varying or behaviour.changed_attributes or self.casts or self.holds_others)

    def of(self, stage: StageModule, like: StageModule) -> Measured:
        """The same for a `stage` of the kind of the one that was measured, `like`."""
        own = dict(zip(like.buffers_read(), stage.buffers_read(), strict=True))
        changed = tuple(own[buffer] for buffer in self.behaviour.changed_buffers)
        behaviour = replace(self.behaviour, modes=stage.modes(), changed_buffers=changed)
        return replace(self, costs=replace(self.costs, name=stage.name), behaviour=behaviour)

    def with_times_of(self, other: Measured) -> Measured:
        """With the times and the smaller forms of `other`, a stage of its kind."""
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
            behaviour=replace(self.behaviour, forms=forms.forms, enough=forms.enough),
            no_forms=other.no_forms,
            timings=other.timings,
            host_bound=other.host_bound,
        )

    def timed(self) -> Measured:
        """With the times of all stages of its kind, once these are measured."""
        if self.timings is None:
            return self
        forward, backward, tail = self.timings.medians()
        costs, more = self.costs, backward - self.costs.backward_time
        forms = tuple(replace(form, backward_time=max(0.0, form.backward_time + more)) for form in costs.forms)
        costs = replace(costs, forward_time=forward, backward_time=backward, tail_time=tail, forms=forms)
        return replace(self, costs=costs, host_bound=self.timings.host_bound)
