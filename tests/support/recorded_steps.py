"""Steps of models that run, recorded on tapes: what estimates are compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from rotoff.core.chain import Chain, LinkRates
from rotoff.planning.stages import StagesOption, stages_of
from rotoff.profile.recorded_step import RecordedStep
from rotoff.profile.sample_step import Loss, run_sample
from rotoff.profile.tape_chain import begins_of, chain_of
from rotoff.profile.trace import Trace, trace_of
from rotoff.tape.contents import Slot
from rotoff.tape.tape import Known


class _Whole(Loss):
    """A loss whose gradient no kernel copies, as fake ones do not."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_ones(ctx.size)


class Unverified(RecordedStep):
    """Holds on to nothing, as a step whose operations are known."""

    def saved(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        super().saved(slot, storage)
        self._kept.clear()

    def enter(self, stage: int) -> None:
        self._new = []
        super().enter(stage)
        self._borders = []


def recorded(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str | int, ...] = ()
) -> Trace:
    """The trace of a step. names: of the outputs from which the backward starts."""
    step = Unverified(Known(), model)
    run_sample(step, partial(step.run, model, *args, **kwargs), names, _Whole)
    step.stop()
    return trace_of(step)


def recorded_chain(model: nn.Module, *args: Any, stages: StagesOption = None, **kwargs: Any) -> Chain:
    """The chain of a step; all operations take the same time."""
    recorded(model, args, kwargs)  # oneDNN and others set themselves up
    batch = sum(
        t.untyped_storage().nbytes() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
    )
    trace = recorded(model, args, kwargs)
    cut = stages_of(model, stages)
    names = () if isinstance(cut, int) else cut
    return chain_of(trace, LinkRates(1e9, 1e9), begins_of(trace, cut), names, beside=batch).chain
