"""What training takes on a device: the model's chain with its parameters, gradients and states, and rows of steps."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..core.chain import Chain
from ..core.figures import overhead
from ..core.parameters import ParameterGroup
from ..core.sequence import FORWARDS, OpKind, Sequence
from ..core.simulator import simulate
from ..core.sizes import as_size
from ..core.steady_step import WHEN
from ..core.trace import Trace
from ..planning.step_planner import keeping_all
from ..profile.estimate.collectives import Collectives
from ..profile.tape_chain import TapeChain
from ..profile.tape_groups import TapeGroups
from ..profile.tape_profile import TapeProfile
from ..solver.anneal import Budget
from ..solver.bounds import least_compute, min_mem_limit, steady_bound
from ..solver.placement import RESIDENT, place
from ..solver.search import Candidate, Problem, best_candidate
from ..solver.settings import (
    ACTIVATIONS,
    CHECKPOINT,
    KEEP,
    ON_HOST,
    SWAPPED,
    UPDATED_ON_HOST,
    Setting,
    sequence_of,
)
from .planned_steps import PlannedStep

EFFORT = 0.05  # `refine` of solve for estimates, whose times are off by more than a longer search gains
SLOTS = 50
_OWN = (*FORWARDS, OpKind.B)  # operations of activations
_MOVED = {"": "activations", "w": "parameters", "g": "gradients", "o": "states"}
_FASTEST_FIRST = (KEEP, CHECKPOINT)  # of those that are combined with moving parameters


@dataclass(frozen=True)
class WholeDevice:
    """All that training on a device takes, and the steps of it.

    profile: of the model. limit: bytes. groups: its parameters, with their gradients and states; empty: they do not
    count. beside: bytes of those that no group has. update_time: seconds of updates that no group has. which: of the
    chains. collectives: of a sharded model. resident: bytes by name that lie on the device between steps if no
    parameters move.
    """

    profile: TapeProfile
    limit: int
    groups: tuple[ParameterGroup, ...] = ()
    beside: int = 0
    update_time: float = 0.0
    which: int = 0
    collectives: Collectives | None = None
    resident: dict[str, int] = field(default_factory=dict)

    def of_step(self, profile: TapeProfile, limit: int) -> WholeDevice:
        """What a step allocates, with all the rest on the device; `limit` is for that."""
        return WholeDevice(profile, limit, (), -profile.batch_bytes, self.updating, collectives=self.collectives)

    @cached_property
    def found(self) -> TapeChain:
        return self.profile.chains[self.which]

    @cached_property
    def chain(self) -> Chain:
        """The chain, which charges each forward as the first one, if parameters move."""
        return replace(self.found.charging_first_runs, parameters=self.groups) if self.groups else self.found.chain

    @property
    def updating(self) -> float:
        """Seconds of all updates on the device."""
        return self.update_time + sum(group.update_time for group in self.groups)

    @cached_property
    def time(self) -> float:
        """Seconds of a step that keeps everything."""
        return self.step_time(simulate(self.chain, sequence_of(self.chain, Setting())))

    def step_time(self, trace: Trace) -> float:
        """Seconds of a step, with the collectives for which kernels wait, and with all updates."""
        waits = 0.0 if self.collectives is None else self.collectives.delay(trace)
        return trace.makespan + waits + self.update_time

    def least(self, updates: str) -> int:
        """The smallest memory for which there is a plan."""
        return min_mem_limit(self.chain, "joint", updates) + self.beside

    def levels(self, sequence: Sequence, plain: bool = False) -> list[int]:
        """What the device holds during each operation. plain: whether the model runs as it is, on plain autograd."""
        if plain:
            own, batch = iter(keeping_all(self.profile).levels), self.profile.batch_bytes
            levels = [
                self.beside + (next(own) + batch + event.parameter_memory if event.op.kind in _OWN else event.memory)
                for event in simulate(self.chain, sequence).events
            ]
        else:
            none = ((0, 0),) * len(self.groups)
            groups = TapeGroups(self.found, self.chain, (), (), none, (), self.beside, 0, 0, 0, torch.device("cpu"))
            levels = groups.levels(sequence, during=True)
        if not self.profile.borders_stay:
            return levels
        # FSDP2's shards of gradients are there when the whole ones have gone; the last ones come together
        late = Counter[int]()
        for group in self.groups:
            late[min(group.stages)] += group.grad_bytes if min(group.stages) > 1 else 0
        return [level - late[op.stage] * (op.kind is OpKind.B) for op, level in zip(sequence, levels, strict=True)]

    # -- rows

    def row(self, name: str, sequence: Sequence, plain: bool = False, setting: str = "") -> PlannedStep:
        """The row of a step. plain: whether it is the plain model's. setting: of a plan of rotoff's, which fits."""
        trace = simulate(self.chain, sequence)
        peak, seconds = max(self.levels(sequence, plain)), self.step_time(trace)
        moved = {op.of for op in sequence if op.kind is OpKind.OFFLOAD or op.kind is OpKind.PREFETCH}
        again = trace.recompute_time or any(op.kind is OpKind.F_SEL for op in sequence)
        moves = ["recomputes"] if again else []
        moves += [name for of, name in _MOVED.items() if of in moved]
        moves += ["updates on the host"] if any(op.kind is OpKind.H for op in sequence) else []
        held, times = (peak, trace.host_peak_bytes), (seconds, overhead(seconds, self.time))
        return PlannedStep(name, bool(setting) or peak <= self.limit, *held, *times, ", ".join(moves), setting)

    def of(self, setting: Setting) -> PlannedStep:
        """The row of a setting."""
        return self.row(str(setting), sequence_of(self.chain, setting), setting == Setting())

    def elsewhere(self) -> list[PlannedStep]:
        """Plain PyTorch, and what is set elsewhere. Where that moves parameters, with the fastest of keeping all
        activations and checkpointing that fits, or the smallest."""
        found = [self.of(Setting(how)) for how in ACTIVATIONS]
        if any(group.grad_bytes for group in self.groups):
            found.append(self._best(Setting(how, parameters=UPDATED_ON_HOST) for how in _FASTEST_FIRST))
            found.append(self._best(self._swapped(how) for how in _FASTEST_FIRST))
            found.append(self._best(Setting(how, parameters=ON_HOST) for how in _FASTEST_FIRST))
        return found

    def _best(self, settings: Iterable[Setting]) -> PlannedStep:
        rows = [self.of(setting) for setting in settings]
        return min(rows, key=lambda row: (not row.fits, row.step_time if row.fits else row.peak_bytes))

    def _swapped(self, how: str) -> Setting:
        """The fewest groups that must be swapped, or all."""

        def fits(count: int) -> bool:
            setting = Setting(how, parameters=SWAPPED, swapped=count)
            return max(self.levels(sequence_of(self.chain, setting))) <= self.limit

        count = bisect_right(range(len(self.groups)), False, key=fits)
        return Setting(how, parameters=SWAPPED, swapped=max(1, count))

    def within_mem_limit(self, name: str, which: int, sequence: Sequence, setting: str) -> PlannedStep:
        """The row of a plan of the activations on the chain `which`, with the updates after it."""
        whole = replace(self, which=which)
        if self.groups:
            sequence = place(whole.chain, sequence.ops, [RESIDENT] * len(self.groups), "after")
        return whole.row(name, sequence, setting=setting)

    def placed(self, options: Mapping[str, Any]) -> tuple[list[PlannedStep], float | None]:
        """The steps that move parameters, too, with updates after the backward and during it, and the seconds that no
        such step can beat. options: of `Checkpointable`, for the setting."""
        rows: list[PlannedStep] = []
        chain, limit, bound = self.chain, self.limit - self.beside, None
        best: Candidate | None = None
        for updates in reversed(WHEN):  # a plan with updates after the backward is one for updates during it
            if limit <= 0 or limit < min_mem_limit(chain, "joint", updates):
                continue
            if bound is None:  # for both, and hardly differs; with a stage for each of many blocks it takes long
                own = self.profile.borders_stay
                bound = least_compute(chain) if own else steady_bound(chain, limit, "during")
            budget = replace(Budget.of(EFFORT), bound=bound)
            found = best_candidate(Problem(chain, limit, None, SLOTS, budget, updates), "joint")
            best = found if best is None else min(best, found, key=lambda one: one.makespan)
            during = {"updates": updates} if updates != "after" else {}
            name = ", ".join(["rotoff, device_limit", *(f"updates {when}" for when in during.values())])
            setting = attaching(f"device_limit={as_size(self.limit)!r}, optimizer=optimizer", {**during, **options})
            rows.append(self.row(name, best.sequence, setting=setting))
        return rows, bound


def attaching(limit: str, options: Mapping[str, Any]) -> str:
    """The call of `rotoff.attach` as text."""
    return f"rotoff.attach(model, {limit}{''.join(f', {name}={value!r}' for name, value in options.items())})"
