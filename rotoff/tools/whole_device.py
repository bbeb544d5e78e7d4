"""The part of `rotoff.plan` that also places parameters, gradients and optimizer states.

Groups of parameters and the bytes of their states are those that `Checkpointable` would find. The time of an update is
the bytes that it reads and writes, divided by the bandwidth of the memory where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ..core.chain import Chain, Form, Stage
from ..core.parameters import ParameterGroup
from ..core.sequence import Sequence
from ..core.simulator import simulate
from ..core.steady_step import WHEN, at_rest
from ..core.trace import Trace
from ..planning.memory_account import expected_levels
from ..profile.estimate.devices import Device
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.parameter_groups import find_groups
from ..profile.profile import Profile
from ..runtime.execution_plan import compile_sequence
from ..solver.anneal import Budget
from ..solver.bounds import host_plan, min_mem_limit, steady_bound
from ..solver.plan_codes import keep_all
from ..solver.search import Candidate, Problem, best_candidate
from ..tensors.stage import StageModule
from .planned_modes import MARGIN, PlacedStep, PlannedStep, moved_by

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # states per parameter element
EFFORT = 0.05  # `refine` of solve for estimates, whose times are off by more than a longer search gains
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


@dataclass(frozen=True)
class Growth:
    """How costs grow with the batch: on the line through those at a batch of `batch` and of `count`.

    Bytes of an operation are the most of several such lines, so they are exact there and at most too high in between.
    A smaller batch takes bytes in proportion.

    larger: the profile at `count`.
    """

    batch: int
    count: int
    larger: Profile

    def at(self, profile: Profile, count: int) -> Profile:
        """`profile`, of a batch of `batch`, at a batch of `count`."""
        if count < self.batch:
            return proportional(self.batch)(profile, count)
        share = (count - self.batch) / (self.count - self.batch)

        def costs(one: Chain | Stage | Form, other: Chain | Stage | Form) -> dict[str, Any]:
            made = {}
            for name, value in vars(one).items():
                if name.endswith(("_bytes", "_time")) and value is not None:
                    more = value + share * (getattr(other, name) - value)
                    made[name] = max(0, round(more) if name.endswith("_bytes") else more)
            return made

        stages = []
        for one, other in zip(profile.chain.stages, self.larger.chain.stages, strict=True):
            forms = [replace(a, **costs(a, b)) for a, b in zip(one.forms, other.forms, strict=True)]
            stages.append(replace(one, **costs(one, other), forms=tuple(forms)))
        skips = tuple(
            replace(a, nbytes=max(0, round(a.nbytes + share * (b.nbytes - a.nbytes))))
            for a, b in zip(profile.skips, self.larger.skips, strict=True)
        )
        chain = replace(profile.chain, stages=tuple(stages), **costs(profile.chain, self.larger.chain))
        return replace(profile, chain=chain, skips=skips, compact=None)  # whose costs are those of `batch`

    def keeping(self, kept: Collection[int], compact: bool = False) -> Growth:
        return replace(self, larger=self.larger.keeping(kept, compact))


@dataclass(frozen=True)
class WholeDevice:
    """All that training on a device takes.

    profile: of the model.
    groups: its parameters, with their gradients and states; None: they do not count.
    beside_bytes: of those that no group has. streamable_bytes: the part of them that may lie on the host, of frozen
        layers before the chain. master_bytes: of the states, those that exist for master weights alone.
    trained: the parameters that need gradients.
    growth: with the batch; None if that is not known.
    """

    profile: Profile
    groups: tuple[ParameterGroup, ...] | None = None
    beside_bytes: int = 0
    streamable_bytes: int = 0
    master_bytes: int = 0
    trained: tuple[nn.Parameter, ...] = ()
    growth: Growth | None = None

    @property
    def activations(self) -> WholeDevice:
        """What a step allocates alone, as a `mem_limit` counts it."""
        return WholeDevice(self.profile, beside_bytes=-self.profile.resident_input_bytes, growth=self.growth)

    def keeping(self, kept: Collection[int], compact: bool = False) -> WholeDevice:
        """This with skip connections kept in place, as `Profile.keeping`."""
        growth = None if self.growth is None else self.growth.keeping(kept, compact)
        return replace(self, profile=self.profile.keeping(kept, compact), growth=growth)

    def at(self, count: int) -> WholeDevice:
        """This at a batch of `count`."""
        assert self.growth is not None
        return replace(self, profile=self.growth.at(self.profile, count))

    @property
    def chain(self) -> Chain:
        return self.placed.chain

    @cached_property
    def placed(self) -> Profile:
        return self.profile if self.groups is None else self.profile.placing(self.groups)

    @property
    def constant_bytes(self) -> int:
        """On the device, in each step that moves parameters, beyond what the machine charges."""
        profile = self.profile
        return self.beside_bytes + profile.unmanaged_bytes + profile.snapshot_bytes + profile.replay_bytes

    def least(self, updates: str) -> int:
        """The smallest memory for which there is a plan."""
        return min_mem_limit(self.chain, "joint", updates) + self.constant_bytes - self.streamable_bytes

    def levels(self, sequence: Sequence, plain: bool = False) -> tuple[Trace, list[int], list[float]]:
        """A step of `sequence`; what the device is expected to hold during each operation; and how much more with one
        more in the batch. plain: whether it is the plain model's."""
        profile = self.placed
        plan = replace(compile_sequence(profile.chain, sequence), keeps_all=plain)
        more = self.beside_bytes + profile.resident_input_bytes
        found = [level + more for level in expected_levels(profile, plan)]
        resting = sum(at_rest(profile.chain, sequence.ops, sequence.resident).device.values())
        found[0] = max(found[0], profile.prefix_peak_bytes + more + resting)
        if self.growth is None:
            return plan.trace, found, []
        grown, batch = self.growth, self.growth.batch
        rows = zip(found, plan.trace.events, simulate(self.at(grown.count).chain, sequence).events, strict=True)
        more += profile.unmanaged_bytes - profile.resident_input_bytes
        # what is expected to be less than the machine charges is so in proportion to the batch
        return (
            plan.trace,
            found,
            [
                (b.memory - a.memory) / (grown.count - batch) - max(0, a.memory + more - level) / batch
                for level, a, b in rows
            ],
        )


def whole_device(
    profile: Profile, device: Device, optimizer: str, host_bandwidth: float, master_weights: bool = False
) -> WholeDevice:
    """What training a model of this profile takes. master_weights: whether parameters in half precision have a copy in
    float32, and their states are in float32, too."""
    model = _OfStages((*profile.prefix, *profile.stages))
    trained = [p for p in model.parameters() if p.requires_grad]
    probe = OptimizerProbe([OPTIMIZERS[optimizer](trained)] if trained else [], torch.device("cpu"), None)
    found = find_groups(model, profile, probe, True, lambda p: p.layout is torch.strided and p.numel() > 0)
    rate = device.memory_bandwidth * device.memory_efficiency

    def masters(parameters: Iterable[nn.Parameter]) -> int:
        return sum(master_bytes(p, probe.state_bytes(p), optimizer) for p in parameters) if master_weights else 0

    def timed(group: ParameterGroup, parameters: Iterable[nn.Parameter]) -> ParameterGroup:
        if not group.grad_bytes:
            return replace(group, update_time=0.0, host_update_time=None)
        states = group.state_bytes + masters(parameters)
        traffic = 2 * group.bytes + group.grad_bytes + 2 * states
        on_host = traffic / host_bandwidth
        return replace(group, state_bytes=states, update_time=traffic / rate, host_update_time=on_host)

    groups = tuple(timed(cost, of.parameters) for cost, of in zip(found.costs, found.placed, strict=True))
    unused = profile.chain.meta["parameter_bytes"] - sum(p.nbytes for p in model.parameters())
    beside = found.outside_bytes + found.outside_update_bytes + max(0, unused)
    beside += masters(found.outside)
    streamable = found.outside_bytes - found.streaming(math.inf).staying_bytes
    return WholeDevice(profile, groups, beside, streamable, masters(trained), tuple(trained))


def master_bytes(parameter: nn.Parameter, state_bytes: int, optimizer: str) -> int:
    """What a copy of `parameter` in float32, and states in float32, take beyond its own states."""
    if not parameter.requires_grad or parameter.element_size() >= 4:
        return 0
    return 4 * parameter.numel() * (1 + OPTIMIZER_STATES[optimizer]) - state_bytes


def placed_steps(whole: WholeDevice, plain: PlannedStep, usable: int) -> tuple[PlacedStep, ...]:
    """The steps that move parameters, too, within `usable` bytes, with updates after the backward and during it.

    plain: the plain model's step; where it fits nothing moves.
    """
    rows: list[PlacedStep] = []
    best: Candidate | None = None
    chain, constant, unit = whole.chain, whole.constant_bytes, whole.chain.compute_time
    least = {updates: int(whole.least(updates) / (1 - MARGIN)) + 1 for updates in WHEN}
    for updates in reversed(WHEN):  # a plan with updates after the backward is one for updates during it
        most = None if whole.growth is None else largest_batch(whole, whole.growth.at, usable, updates)
        if plain.fits:
            held = plain.peak_bytes, plain.host_bytes, unit
            rows.append(PlacedStep(updates, plain.step_time, plain.overhead, *held, least[updates], most))
            continue
        trace = simulate(chain, keep_all(chain, updates), updates=updates)
        streamed = min(whole.streamable_bytes, max(0, trace.peak_bytes + constant - usable))
        limit = usable - constant + streamed
        if limit <= 0 or limit < min_mem_limit(chain, "joint", updates):
            rows.append(PlacedStep(updates, None, None, None, None, None, least[updates], None))
            continue
        bound = steady_bound(chain, limit, "during")  # holds for both, and hardly differs
        best = _best(chain, limit, updates, bound, best)
        sequence = Sequence(best.ops, resident=list(best.resident))
        trace = simulate(chain, sequence, updates=updates)
        held = trace.peak_bytes + constant - streamed, trace.host_peak_bytes + streamed, bound
        overhead = trace.makespan / unit - 1 if unit else 0.0
        rows.append(
            PlacedStep(updates, trace.makespan, overhead, *held, least[updates], most, moved_by(sequence, trace))
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


def largest_batch(whole: WholeDevice, at: Callable[[Profile, int], Profile], usable: int, updates: str) -> int | None:
    """The largest batch whose smallest memory is within `usable`. at: makes the profile of a batch."""
    limit = usable - whole.constant_bytes + whole.streamable_bytes

    def fits(count: int) -> bool:
        return host_plan(replace(whole, profile=at(whole.profile, count)).chain, limit, updates) is not None

    return largest_count(fits)


def largest_count(fits: Callable[[int], bool], known: int = 0) -> int | None:
    """The largest number that fits; None if none does. A larger one must need more. known: a number that fits, or 0."""
    low, high = known, max(1, 2 * known)
    while high <= MOST_BATCHES and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def proportional(batch: int) -> Callable[[Profile, int], Profile]:
    """Makes the profile of another batch from that of a batch of `batch`: all bytes and seconds of its stages in
    proportion, but the gradient of a parameter, which a backward makes beside its transients."""

    def at(profile: Profile, count: int) -> Profile:
        share = count / batch

        def sizes(one: Chain | Stage | Form, fixed: int = 0) -> dict[str, Any]:
            made = {
                name: round(value * share) for name, value in vars(one).items() if name.endswith("_bytes") and value
            }
            if not isinstance(one, Chain):
                gradient = min(fixed, one.backward_transient_bytes)
                made["backward_transient_bytes"] = gradient + round((one.backward_transient_bytes - gradient) * share)
            return made

        stages = []
        for cost, stage, placed in zip(profile.chain.stages, profile.stages, profile.placed, strict=True):
            fixed = max((p.nbytes for p in _OfStages((stage,)).parameters() if p.requires_grad), default=0)
            forms = tuple(replace(form, **sizes(form, fixed)) for form in cost.forms)
            assert cost.grad_bytes is not None
            waiting = {"grad_bytes": placed.waiting + round((cost.grad_bytes - placed.waiting) * share)}
            stages.append(replace(cost, **{**sizes(cost, fixed), **waiting}, forms=forms))
        return replace(profile, chain=replace(profile.chain, stages=tuple(stages), **sizes(profile.chain)))

    return at
