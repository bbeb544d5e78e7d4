"""The part of `rotoff.plan` that also places parameters, gradients and optimizer states.

The time of an update is the bytes that it reads and writes, divided by the bandwidth of the memory where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from ..core.chain import Chain
from ..core.parameters import ParameterGroup, in_parts
from ..core.sequence import FORWARDS, OpKind, Sequence
from ..core.simulator import simulate
from ..core.steady_step import WHEN
from ..planning.step_planner import keeping_all
from ..profile.estimate.devices import Device
from ..profile.estimate.estimate import Estimate
from ..profile.estimate.growth import Growth
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.tape_chain import StageRun, TapeChain
from ..profile.tape_groups import TapeGroups, members_of, movable_of
from ..profile.tape_profile import TapeProfile
from ..runtime.placed.tensor import room_of
from ..solver.anneal import Budget
from ..solver.bounds import min_mem_limit, steady_bound
from ..solver.search import Candidate, Problem, best_candidate
from ..tensors.storage import storage_key
from .planned_modes import MARGIN, PlacedStep, PlannedStep, moved_by
from .size_search import largest_within

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # states per parameter element
EFFORT = 0.05  # `refine` of solve for estimates, whose times are off by more than a longer search gains
SLOTS = 50
OWN = (*FORWARDS, OpKind.B)  # operations of activations


@dataclass(frozen=True)
class WholeDevice:
    """All that training on a device takes.

    profile: of the model. groups: its parameters, with their gradients and states; empty: they do not count. beside:
    bytes of those that no group has. master_bytes: of the states, those that exist for master weights alone. trained:
    the parameters that need gradients. growth: with the batch; None if that is not known. which: of the chains.
    """

    profile: TapeProfile
    groups: tuple[ParameterGroup, ...] = ()
    beside: int = 0
    master_bytes: int = 0
    trained: tuple[nn.Parameter, ...] = ()
    growth: Growth | None = None
    which: int = 0
    _known: dict[tuple[int, int], WholeDevice] = field(default_factory=dict, compare=False)

    def at(self, count: int) -> WholeDevice:
        """This at a batch of `count`."""
        assert self.growth is not None
        key = count, self.which
        if key not in self._known:
            self._known[key] = replace(self, profile=self.growth.at(count), growth=None)
        return self._known[key]

    @cached_property
    def found(self) -> TapeChain:
        return self.profile.chains[self.which]

    @cached_property
    def chain(self) -> Chain:
        """The chain, which charges each forward as the first one, if parameters move."""
        return replace(charging_first_runs(self.found), parameters=self.groups) if self.groups else self.found.chain

    def least(self, updates: str) -> int:
        """The smallest memory for which there is a plan."""
        return min_mem_limit(self.chain, "joint", updates) + self.beside

    def least_at(self, updates: str, count: int) -> int:
        """The same at a batch of `count`."""
        return self.at(count).least(updates)

    def levels(self, sequence: Sequence, plain: bool = False) -> list[int]:
        """What the device holds during each operation. plain: whether the model runs as it is, on plain autograd."""
        if plain:
            levels, batch = iter(keeping_all(self.profile).levels), self.profile.batch_bytes
            return [
                self.beside + (next(levels) + batch + event.parameter_memory if event.op.kind in OWN else event.memory)
                for event in simulate(self.chain, sequence).events
            ]
        none = ((0, 0),) * len(self.groups)
        groups = TapeGroups(self.found, self.chain, (), (), none, self.beside, 0, 0, 0, 0, torch.device("cpu"))
        return groups.levels(sequence, during=True)


def whole_device(
    profile: Estimate, device: Device, optimizer: str, host_bandwidth: float, master_weights: bool = False
) -> WholeDevice:
    """What training a model of this profile takes. master_weights: whether parameters in half precision have a copy in
    float32, and their states are in float32, too."""
    every = list(profile.step.model.parameters())
    trained = [p for p in every if p.requires_grad]
    probe = OptimizerProbe([OPTIMIZERS[optimizer](trained)] if trained else [], torch.device("cpu"), None)
    rate = device.memory_bandwidth * device.memory_efficiency

    def masters(parameters: Iterable[nn.Parameter]) -> int:
        return sum(master_bytes(p, probe.state_bytes(p), optimizer) for p in parameters) if master_weights else 0

    def group(stages: tuple[int, ...], part: list[nn.Parameter]) -> ParameterGroup:
        nbytes, name = sum(map(room_of, part)), profile.chain.stage(stages[0]).name
        if not part[0].requires_grad:
            return ParameterGroup(stages, nbytes, 0, 0, 0.0, None, name=name)
        states = sum(map(probe.state_bytes, part)) + masters(part)
        traffic = 3 * nbytes + 2 * states  # what is updated is read and written, gradients are read
        times = traffic / rate, traffic / host_bandwidth
        return ParameterGroup(stages, nbytes, nbytes, states, *times, probe.update_bytes(part), name=name)

    reads = profile.step.reading
    _, movable = movable_of(profile.step.model, reads.staying, lambda p: p.numel() > 0)
    members = members_of(movable, reads, profile.chains[0].layout.begins, probe)
    whole = sum(room_of(p) for several in members.values() for p in several)
    parts = [
        (stages, part)
        for (stages, _, _), several in sorted(members.items(), key=lambda one: one[0])
        for part in in_parts(several, map(room_of, several), whole)
    ]
    grouped = {id(p) for _, part in parts for p in part}
    outside = [p for p in every if id(p) not in grouped]
    beside = sum({storage_key(b): b.untyped_storage().nbytes() for b in profile.step.model.buffers()}.values())
    beside += sum(p.nbytes * (1 + p.requires_grad) + probe.state_bytes(p) for p in outside)
    beside += masters(outside) + probe.update_bytes(outside) + probe.unplaced_bytes(every)
    groups = tuple(group(stages, part) for stages, part in parts)
    return WholeDevice(profile.moving, groups, beside, masters(trained), tuple(trained))


def charging_first_runs(found: TapeChain) -> Chain:
    """The chain with the transients of first runs where these are larger. In a first run the model's code holds more
    than what a stage makes again."""
    stages = []
    for i, (stage, run) in enumerate(zip(found.chain.stages, found.runs, strict=True), start=1):

        def more(stays: frozenset[int], transient: int, run: StageRun = run, i: int = i) -> int:
            return max(transient, run.first_peak(stays, found.handed[i - 1]) - found.trace.size(stays))

        forms = tuple(
            replace(form, forward_transient_bytes=more(kept, form.forward_transient_bytes))
            for form, kept in zip(stage.forms, found.forms[i - 1][1:], strict=True)
        )
        assert stage.checkpoint_transient_bytes is not None
        stages.append(
            replace(
                stage,
                forward_transient_bytes=more(found.forms[i - 1][0], stage.forward_transient_bytes),
                checkpoint_transient_bytes=more(found.handed[i], stage.checkpoint_transient_bytes),
                forms=forms,
            )
        )
    return replace(found.chain, stages=tuple(stages))


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
    chain, unit = whole.chain, whole.chain.compute_time
    least = {updates: int(whole.least(updates) / (1 - MARGIN)) + 1 for updates in WHEN}
    for updates in reversed(WHEN):  # a plan with updates after the backward is one for updates during it
        most = None if whole.growth is None else largest_within(usable, partial(whole.least_at, updates))
        if plain.fits:
            held = plain.peak_bytes, plain.host_bytes, unit
            rows.append(PlacedStep(updates, plain.step_time, plain.overhead, *held, least[updates], most))
            continue
        limit = usable - whole.beside
        if limit <= 0 or limit < min_mem_limit(chain, "joint", updates):
            rows.append(PlacedStep(updates, None, None, None, None, None, least[updates], None))
            continue
        bound = steady_bound(chain, limit, "during")  # holds for both, and hardly differs
        best = _best(chain, limit, updates, bound, best)
        sequence = Sequence(best.ops, resident=list(best.resident))
        trace = simulate(chain, sequence, updates=updates)
        held = max(whole.levels(sequence)), trace.host_peak_bytes, bound
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
