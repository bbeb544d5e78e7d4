"""The part of `rotoff.plan` that also places parameters, gradients and optimizer states.

Groups of parameters and the bytes of their states are those that `Checkpointable` would find. The time of an update is
the bytes that it reads and writes, divided by the bandwidth of the memory where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.chain import Chain, Form, Stage
from ..core.parameters import ParameterGroup
from ..core.sequence import Sequence
from ..core.simulator import simulate
from ..core.steady_step import WHEN
from ..profile.estimate.devices import Device
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.parameter_groups import find_groups
from ..profile.profile import Profile
from ..solver.anneal import Budget
from ..solver.bounds import host_plan, min_mem_limit, steady_bound
from ..solver.plan_codes import keep_all
from ..solver.search import Candidate, Problem, best_candidate
from ..tensors.stage import StageModule
from .planned_modes import MARGIN, PlacedStep

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
EFFORT = 0.15  # `refine` of solve for estimates, whose times are off by more than a longer search gains
SLOTS = 50
MOST_BATCHES = 1 << 20


class _OfStages(nn.Module):
    """The parameters and buffers of stages, as a model for `find_groups`."""

    def __init__(self, stages: tuple[StageModule, ...]) -> None:
        super().__init__()
        self._all = tuple(module for stage in stages for module in stage.modules)  # no children: they name their own

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter({id(p): p for module in self._all for p in module.parameters(recurse)}.values())

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return iter({id(b): b for module in self._all for b in module.buffers(recurse)}.values())


def with_parameters(profile: Profile, device: Device, optimizer: str, host_bandwidth: float) -> tuple[Chain, int, int]:
    """The profile's chain with its groups of parameters, and the bytes on the device that the chain does not have. The
    last number: those of them that may lie on the host, of frozen layers before the chain."""
    model = _OfStages((*profile.prefix, *profile.stages))
    trained = [p for p in model.parameters() if p.requires_grad]
    probe = OptimizerProbe([OPTIMIZERS[optimizer](trained)] if trained else [], torch.device("cpu"), None)
    found = find_groups(model, profile, probe, True, lambda p: p.layout is torch.strided and p.numel() > 0)
    rate = device.memory_bandwidth * device.memory_efficiency

    def timed(group: ParameterGroup) -> ParameterGroup:
        if not group.grad_bytes:
            return replace(group, update_time=0.0, host_update_time=None)
        traffic = 2 * group.bytes + group.grad_bytes + 2 * group.state_bytes
        return replace(group, update_time=traffic / rate, host_update_time=traffic / host_bandwidth)

    chain = profile.placing(tuple(timed(group) for group in found.costs)).chain
    unused = profile.chain.meta["parameter_bytes"] - sum(p.nbytes for p in model.parameters())
    constant = found.outside_bytes + found.outside_update_bytes + max(0, unused)
    constant += profile.unmanaged_bytes + profile.snapshot_bytes + profile.replay_bytes
    return chain, constant, found.outside_bytes - found.streaming(math.inf).staying_bytes


def placed_steps(
    profile: Profile, chain: Chain, constant: int, streamable: int, usable: int, batch: int | None
) -> tuple[PlacedStep, ...]:
    """The steps of `chain` within `usable` bytes, with updates after the backward and during it.

    chain, constant, streamable: as `with_parameters` returns them for `profile`. batch: the sample's batch size, if it
    has one.
    """
    rows: list[PlacedStep] = []
    best: Candidate | None = None
    unit = chain.compute_time
    for updates in reversed(WHEN):  # a plan with updates after the backward is one for updates during it
        least = int((min_mem_limit(chain, "joint", updates) + constant - streamable) / (1 - MARGIN)) + 1
        everything = keep_all(chain, updates)
        trace, bound = simulate(chain, everything, updates=updates), unit
        streamed = min(streamable, max(0, trace.peak_bytes + constant - usable))
        limit = usable - constant + streamed
        if trace.peak_bytes > limit:  # else nothing moves, even if an update on the host would be faster
            if limit <= 0 or limit < min_mem_limit(chain, "joint", updates):
                rows.append(PlacedStep(updates, None, None, None, None, None, least, None))
                continue
            bound = steady_bound(chain, limit, "during")  # holds for both, and hardly differs
            best = _best(chain, limit, updates, bound, best)
            trace = simulate(chain, Sequence(best.ops, resident=list(best.resident)), updates=updates)
        rows.append(
            PlacedStep(
                updates=updates,
                step_time=trace.makespan,
                overhead=trace.makespan / unit - 1 if unit else 0.0,
                peak_bytes=trace.peak_bytes + constant - streamed,
                host_bytes=trace.host_peak_bytes + streamed,
                bound_time=bound,
                min_device_bytes=least,
                largest_batch=None
                if batch is None
                else _largest_batch(profile, chain, usable - constant + streamable, batch, updates),
            )
        )
    return tuple(rows)


def _best(chain: Chain, limit: int, updates: str, bound: float, known: Candidate | None) -> Candidate:
    """The best plan found; `known` if that is close to the bound, and else a search starts from it."""
    budget = replace(Budget.of(EFFORT), bound=bound)
    if known is None:
        return best_candidate(Problem(chain, limit, None, SLOTS, budget, updates), "joint")
    if known.makespan <= budget.enough(chain):
        return known
    codes = () if known.codes is None else (known.codes,)
    again = best_candidate(Problem(chain, limit, None, SLOTS, budget, updates, codes), "joint")
    return min(again, known, key=lambda one: one.makespan)


def _largest_batch(profile: Profile, chain: Chain, limit: int, batch: int, updates: str) -> int | None:
    """The largest batch whose smallest limit is within `limit`."""

    def fits(count: int) -> bool:
        larger = replace(profile, chain=_scaled(profile, count / batch)).placing(chain.parameters).chain
        return host_plan(larger, limit, updates) is not None

    low, high = 0, 1
    while high <= MOST_BATCHES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def _scaled(profile: Profile, share: float) -> Chain:
    """The chain of another batch size: all bytes and seconds of its stages times `share`. The gradient of a parameter,
    which a backward makes beside its transients, has the same bytes for each."""

    def sizes(one: Chain | Stage | Form, fixed: int = 0) -> dict[str, Any]:
        made = {name: round(value * share) for name, value in vars(one).items() if name.endswith("_bytes")}
        if not isinstance(one, Chain):
            gradient = min(fixed, one.backward_transient_bytes)
            made["backward_transient_bytes"] = gradient + round((one.backward_transient_bytes - gradient) * share)
        return made

    def costs(one: Stage | Form, fixed: int) -> dict[str, Any]:
        return {**sizes(one, fixed), **{n: v * share for n, v in vars(one).items() if n.endswith("_time")}}

    stages = []
    for cost, stage, placed in zip(profile.chain.stages, profile.stages, profile.placed, strict=True):
        fixed = max((p.nbytes for p in _OfStages((stage,)).parameters() if p.requires_grad), default=0)
        forms = tuple(replace(form, **costs(form, fixed)) for form in cost.forms)
        assert cost.grad_bytes is not None
        waiting = {"grad_bytes": placed.waiting + round((cost.grad_bytes - placed.waiting) * share)}
        stages.append(replace(cost, **{**costs(cost, fixed), **waiting}, forms=forms))
    return replace(profile.chain, stages=tuple(stages), **sizes(profile.chain))
