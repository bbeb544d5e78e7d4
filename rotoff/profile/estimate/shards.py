"""What a rank holds of a model that was sharded, and where the step reads it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from torch import nn

from ...runtime.sharded import sharded
from ...tensors.storage import local
from ..recorded_step import RecordedStep


def with_shards(step: RecordedStep, model: nn.Module, at: Mapping[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """Replace sharded parameters of `model`, whose step has ended, by what this rank holds of them. Return the
    positions at which parameters are read, by their ids. at: those that the step has seen.

    FSDP2 reads those of a module that it sharded wherever that runs. The root gathers once, before the first
    operation, and reduces its gradients after all backwards.
    """
    starts, found = [segment.first for segment in step.segments], dict(at)
    for name, unit in sharded(model).items():  # the innermost comes last
        within = frozenset(
            position
            for n, position in enumerate(step.positions)
            if f"{step.segments[bisect_right(starts, n) - 1].module}.".startswith(f"{name}.")
        )
        found |= dict.fromkeys(map(id, unit.parameters()), within if name else frozenset(step.positions[:1]))
    held: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and (shard := local(p)) is not p:
                one = held.setdefault(id(p), nn.Parameter(shard.detach(), requires_grad=p.requires_grad))
                module._parameters[name] = one
    return {id(held[key]) if key in held else key: some for key, some in found.items()}
