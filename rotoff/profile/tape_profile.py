"""What a step of a model showed, and the chains into which it can be cut."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..core.chain import Chain, LinkRates
from .checkpointed import plain_levels
from .tape_chain import FAR, STAGES, TapeChain, begins_of, chain_of, finest
from .trace import Trace

MORE = 1.5  # stages of the finest cut / stages that are asked for, at most


@dataclass(frozen=True, eq=False)
class TapeProfile:
    """The profile of a step.

    Attributes:
        trace: what the step did.
        device: on which it ran.
        rates: of the link to the host.
        batch_bytes: of the input, which the chain counts and a `mem_limit` does not.
        stages: about how many, or the names of the modules that are stages.
        forms: whether stages may keep a part of what they save.
        shapes: of the tensors of the input.
        seen: whether the step has run; if not, its bytes are those of fake tensors.
        begins: positions at which stages begin, for each of several cuts, in place of `stages`.
        varies: whether its sizes may depend on data, so that a step is followed also if it keeps everything.
        borders_stay: whether what stages hand on stays on the device, so that each is made again by itself alone.
        like: the chains of a step of the same operations, whose stages and forms are taken.
        common: its chains with the largest costs of all processes that follow one plan. plain: their most bytes of the
            model as it is, between its forward and its backward, and of the caller's loss.
        least: the fewest bytes that a plan was found to hold, by what was asked.
    """

    trace: Trace
    device: torch.device
    rates: LinkRates
    batch_bytes: int = 0
    stages: int | Collection[str] = STAGES
    forms: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()
    seen: bool = True
    begins: tuple[tuple[int, ...], ...] = ()
    varies: bool = False
    borders_stay: bool = False
    like: tuple[TapeChain, ...] = ()
    common: tuple[TapeChain, ...] = ()
    plain: tuple[int, int, int] | None = None
    least: dict[object, int] = field(init=False, default_factory=dict)

    @cached_property
    def chains(self) -> list[TapeChain]:
        """The step as a chain, for each cut. If contents that few stages need stay on the device, also one that hands
        them on."""
        if self.common:
            return list(self.common)
        if self.borders_stay:
            return [self._chain(self.cuts[0], 0, 0)]
        found = list[TapeChain]()
        for begins in self.cuts:
            found.append(self._chain(begins, FAR, len(found)))
            if found[-1].stay:
                found.append(self._chain(begins, math.inf, len(found)))
        return found

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The positions at which stages begin. If the finest cut has not many more stages than asked for, also its."""
        if given := self.begins or tuple(dict.fromkeys(one.layout.begins for one in self.like)):
            return given
        first = begins_of(self.trace, self.stages)
        if not isinstance(self.stages, int):
            return (first,)
        others = (finest(self.trace, only_saved) for only_saved in (True, False))
        return (first, *(one for one in others if len(first) < len(one) <= MORE * self.stages))

    def _chain(self, begins: tuple[int, ...], far: float, number: int) -> TapeChain:
        names = () if isinstance(self.stages, int) else self.stages
        like = self.like[number] if self.like else None
        return chain_of(self.trace, self.rates, begins, names, far, self.batch_bytes, self.forms, like)

    @property
    def chain(self) -> Chain:
        """The first of the chains."""
        return self.chains[0].chain

    @cached_property
    def moving(self) -> Any:  # of the same class
        """This of a step whose parameters' gradients count as those of groups, cut into the same stages."""
        trace = replace(self.trace, backward=tuple(event for event in self.trace.backward if not event.kept))
        return replace(self, trace=trace, like=tuple(self.chains), common=(), plain=None)

    def timed_by(self, other: Trace) -> TapeProfile:
        """Return this with the shorter time of each operation of its trace and of `other`, the same step again."""
        return replace(self, trace=self.trace.timed_by(other))

    @property
    def chain_keys(self) -> tuple[int, ...]:
        """What tells the operations of this step from others."""
        return self.chains[0].layout.keys

    def keep_all_bytes(self, in_flight: int = 1) -> int:
        """The smallest `mem_limit` with which the model runs as it is, with so many micro-batches under way."""
        followed = self.trace.states if self.varies else 0
        most, resting, _ = self._levels
        return most + (in_flight - 1) * (resting - self.trace.unsharded) + in_flight * followed

    @property
    def beside_resting(self) -> int:
        """Bytes that a resting micro-batch adds to a `mem_limit` beside what the chain counts: those of the caller's
        loss, less those of the batch, and of parameters that FSDP2 has gathered for all."""
        return self._levels[2] - self.batch_bytes - self.trace.unsharded

    @property
    def _levels(self) -> tuple[int, int, int]:
        return plain_levels(self.trace) if self.plain is None else self.plain

    @property
    def strategy(self) -> str:
        """How the step was cut into stages, for people."""
        if isinstance(self.stages, int):
            return f"{len(self.chain)} stages, cut where few bytes cross"
        return f"{len(self.chain)} stages, which end where calls of {len(self.stages)} modules end"
