"""A question of `rotoff.plan` about a model and a device, and its answer.

The time of an update is the bytes that it reads and writes, divided by the bandwidth of the memory where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..accelerator import is_available, named
from ..checkpointable import Checkpointable
from ..core.modes import parse_modes
from ..core.parameters import ParameterGroup
from ..core.sequence import MODES
from ..core.sizes import as_size, parse_bytes
from ..core.steady_step import WHEN
from ..errors import InfeasibleError, OptionError
from ..planning.options import Options, check_flag
from ..planning.request import Request
from ..planning.step_planner import keeping_all, least_limit, least_time, make_plan
from ..profile.estimate.devices import Device
from ..profile.estimate.estimate import Estimate
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.tape_groups import gradient_bytes, movable_of, parts_of
from ..runtime.placed.tensor import room_of
from ..solver.settings import Setting
from ..tensors.storage import storage_key
from .estimate import estimated
from .foreign_settings import ForeignSettings
from .mesh import ONE, Mesh, check_positive
from .planned_steps import NOW, PlannedStep, PlannedSteps, memory_with, usable_bytes
from .whole_device import EFFORT, SLOTS, WholeDevice, attaching

# With states per element of a parameter.
OPTIMIZERS: dict[str, tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], int]] = {
    "sgd": (partial(torch.optim.SGD, lr=1e-3), 0),
    "momentum": (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), 1),
    "adam": (torch.optim.Adam, 2),
    "adamw": (torch.optim.AdamW, 2),
}
HOST_BANDWIDTH = 40e9  # B/s of two channels of DDR5, half of which the link takes
Noted = Callable[[float, str], None]


@dataclass(frozen=True)
class Question:
    """Arguments of `rotoff.plan`; see there. cut: how a model that is no `Checkpointable` is cut into stages. settings:
    of another tool.

    Raises:
        OptionError, LimitError: for an invalid one.
    """

    device: Device
    cut: Options
    modes: Any = MODES
    mem_limit: Any = None
    optimizer: str = "adam"
    host_bandwidth: float = HOST_BANDWIDTH
    master_weights: bool = False
    ranks: Mesh = ONE
    settings: ForeignSettings | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise OptionError(f"optimizer is {self.optimizer!r}; known ones are {', '.join(OPTIMIZERS)}")
        check_flag("master_weights", self.master_weights)
        check_positive("host_bandwidth", self.host_bandwidth, "give bytes per second above 0")
        limit = None if self.mem_limit is None else parse_bytes(self.mem_limit)
        read = {"modes": parse_modes(self.modes), "mem_limit": limit, "device": self.ranks.on(self.device)}
        if self.settings is not None:
            said = self.settings.said
            read |= {name: said[name] for name in ("optimizer", "master_weights") if name in said}
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def usable(self) -> int:
        """Bytes of the device for training."""
        return usable_bytes(self.device.memory_bytes)

    def estimated(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Estimate:
        """The estimated profile of `model` on a rank, in the autocast that the settings name."""
        half = None if self.settings is None else self.settings.said.get("autocast")
        kind = named(0).type if is_available(named(0)) else "cpu"
        within = torch.autocast(kind, getattr(torch, half)) if half else nullcontext()
        with within, self.ranks.started() as shard:
            return estimated(model, args, kwargs, self.device, shard, self.cut)

    def in_the_same_bytes(self, profile: Estimate) -> Question:
        """This for a device with no more memory than the other tool's settings take, unless there is a `mem_limit`."""
        if self.settings is None or self.mem_limit is not None:
            return self
        takes = self.whole(profile).of(self.settings.setting).peak_bytes
        name = f"{self.device.name} as it is used now"
        return replace(self, device=replace(self.device, name=name, memory_bytes=memory_with(takes)))

    def whole(self, profile: Estimate) -> WholeDevice:
        """What training a model of this profile takes on the device."""
        every = list(profile.step.model.parameters())
        trained = [p for p in every if p.requires_grad]
        make, many = OPTIMIZERS[self.optimizer]
        probe = OptimizerProbe([make(trained)] if trained else [], torch.device("cpu"), None)
        rate = self.device.memory_bandwidth * self.device.memory_efficiency

        def masters(parameters: Iterable[nn.Parameter]) -> int:
            """What copies in float32, and states in float32, take beyond the states that there are."""
            small = [p for p in parameters if self.master_weights and p.requires_grad and p.element_size() < 4]
            return sum(4 * (1 + many) * p.numel() - probe.state_bytes(p) for p in small)

        def group(stages: tuple[int, ...], part: list[nn.Parameter]) -> ParameterGroup:
            nbytes, name = sum(map(room_of, part)), profile.chain.stage(stages[0]).name
            if not part[0].requires_grad:
                return ParameterGroup(stages, nbytes, 0, 0, 0.0, None, name=name)
            states = sum(map(probe.state_bytes, part)) + masters(part)
            traffic = 3 * nbytes + 2 * states  # what is updated is read and written, gradients are read
            times = traffic / rate, traffic / self.host_bandwidth
            gradients = gradient_bytes(part, reads, 1)
            return ParameterGroup(stages, nbytes, gradients, states, *times, probe.update_bytes(part), name=name)

        reads = profile.step.reading
        _, movable = movable_of(profile.step.model, reads.staying, may=lambda p: p.numel() > 0)
        whole = sum(room_of(p) for p in movable if id(p) in reads.at)
        parts = parts_of(movable, reads, profile.chains[0].layout.begins, probe, whole)
        grouped = {id(p) for _, part in parts for p in part}
        outside = [p for p in every if id(p) not in grouped]
        beside = sum({storage_key(b): b.untyped_storage().nbytes() for b in profile.step.model.buffers()}.values())
        beside += sum(p.nbytes * (1 + p.requires_grad) + probe.state_bytes(p) for p in outside)
        beside += masters(outside) + probe.update_bytes(outside) + probe.unplaced_bytes(every)
        gradients = sum(p.nbytes for p in trained)
        resident = {
            "parameters": sum(p.nbytes for p in every),
            "buffers": profile.meta["buffer_bytes"],
            "gradients": gradients,
            f"{self.optimizer} states": many * gradients + masters(trained),
            "batch": profile.batch_bytes,
        }
        groups, calls = tuple(group(stages, part) for stages, part in parts), profile.collectives
        return WholeDevice(profile.moving, self.usable, groups, beside, collectives=calls, resident=resident)

    def request(self, limit: int, mode: str = "joint") -> Request:
        return Request(limit, mode, SLOTS, {"refine": EFFORT})

    def left_bytes(self, profile: Estimate) -> int:
        """How many more bytes there are than those of the smallest plan: of a `mem_limit` if one is asked for, else of
        the device's memory for training."""
        whole = self.whole(profile)
        stay = sum(whole.resident.values())
        if self.mem_limit is not None:
            return min(self.mem_limit, self.usable - stay) - least_limit(profile, self.request(self.usable))
        placed = [whole.least(updates) for updates in WHEN] if whole.groups else []
        least = min(whole.of(Setting()).peak_bytes, *placed)
        if least > stay:  # or no step besides resident bytes takes fewer
            least = min(least, least_limit(profile, self.request(self.usable)) + stay)
        return self.usable - least

    def answered(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], note: Noted) -> PlannedSteps:
        """The table for `model`. note: is told what is done next."""
        note(0.0, "tracing the model")
        profile = self.estimated(model, args, kwargs)
        return self.in_the_same_bytes(profile).answer(model, profile, note)

    def answer(self, model: nn.Module, profile: Estimate, note: Noted = lambda *_: None) -> PlannedSteps:
        """The table. note: is told what is done next."""
        whole = self.whole(profile)
        cut = model._options if isinstance(model, Checkpointable) else self.cut
        options = {**cut.chosen, **self.ranks.options}
        limit, asked = max(0, self.usable - sum(whole.resident.values())), self.mem_limit is not None
        limit = limit if self.mem_limit is None else min(self.mem_limit, limit)
        make = whole.of_step(profile, limit) if asked else whole
        note(0.4, "other systems' settings")
        steps = make.elsewhere()
        if self.settings is not None:
            now = make.of(self.settings.setting)
            steps.insert(1, replace(now, name=NOW + now.name))
        bound, own, placed = None, list[PlannedStep](), list[PlannedStep]()
        if steps[0].fits:
            bound = make.chain.compute_time + make.update_time
        elif whole.groups and not asked:
            note(0.5, "parameters placed")
            placed, bound = whole.placed(options)
        if not steps[0].fits and limit > 0:
            note(0.8, "activations")
            own, found = self._in_modes(profile, limit, options, make)
            if own and bound is None:
                bound = min(least_time(profile, self.request(limit), found), found) + make.updating
        return PlannedSteps(
            chain=profile.chain,
            device=self.device.name,
            device_bytes=self.device.memory_bytes,
            mem_limit=limit,
            asked=asked,
            keep_all_bytes=keeping_all(profile).peak,
            resident_bytes=whole.resident,
            min_mem_limits={mode: least_limit(profile, self.request(limit, mode)) for mode in self.modes},
            min_device_bytes=memory_with(whole.least("after")),
            steps=(*steps, *own, *placed),
            bound_time=bound,
            notes=self._notes(profile),
            mesh=self.ranks.planned(profile),
        )

    def _in_modes(
        self, profile: Estimate, limit: int, options: Mapping[str, Any], make: WholeDevice
    ) -> tuple[list[PlannedStep], float]:
        """A row for each mode with a plan, and the seconds of the fastest step."""
        rows, fastest = [], math.inf
        for mode in self.modes:
            request = self.request(limit, mode)
            try:
                plan = make_plan(profile, request)
            except InfeasibleError:
                continue
            fastest = min(fastest, plan.trace.makespan)
            name, said = ("", {}) if mode == "joint" else (f", mode {mode}", {"mode": mode})
            which, setting = profile.chains.index(plan.tape_chain), attaching(repr(as_size(limit)), {**said, **options})
            rows.append(make.within_mem_limit(f"rotoff, mem_limit{name}", which, plan.sequence, setting))
        return rows, fastest

    def _notes(self, profile: Estimate) -> tuple[str, ...]:
        """What the figures rest on."""
        trained = [p for p in profile.step.model.parameters() if p.requires_grad]
        small = {str(p.dtype).removeprefix("torch.") for p in trained if p.element_size() < 4}
        states = ""
        if small and self.master_weights:
            states = "; states and master weights in float32"
        elif small:
            states = f"; states in {' and '.join(sorted(small))} as the parameters, without float32 master weights"
        notes = [] if self.settings is None else [*self.settings.notes(next(iter(profile.shapes), ())[:1])]
        notes.append(f"times are estimates, with the updates of {self.optimizer}{states}")
        if (outputs := profile.step.unnamed) > 1:
            notes.append(
                f"the gradients of all {outputs} outputs are charged; if the backward starts from the loss alone, it"
                ' takes less: backward_from="loss" (--backward-from loss)'
            )
        return tuple(notes)
