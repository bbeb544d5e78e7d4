"""Finds the answer to a question of `rotoff.plan`: estimates the model and plans it in each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..core.modes import parse_modes
from ..core.sizes import as_size, format_bytes, parse_bytes
from ..core.steady_step import WHEN
from ..errors import InfeasibleError, LimitError, MeasureError, OptionError
from ..module_proxy import ModuleProxy
from ..planning.options import check_flag
from ..planning.request import Request
from ..planning.step_planner import StepPlan, keeping_all, least_limit, least_time, make_plan
from ..profile.allocations import without_gc
from ..profile.estimate.devices import Device
from ..profile.estimate.estimate import Estimate
from ..profile.estimate.growth import Growth
from ..solver.bounds import min_mem_limit
from ..solver.settings import Setting
from ..solver.slots import parse_slots
from ..tensors.tree import flatten
from .estimate import estimated
from .planned_modes import WAYS_ON, PlacedStep, PlannedMode, PlannedModes, PlannedStep, resident_parts, usable_bytes
from .planned_steps import Steps
from .size_search import largest_within
from .whole_device import EFFORT, OPTIMIZER_STATES, WholeDevice, placed_steps, whole_device


@dataclass(frozen=True)
class Question:
    """Arguments of `rotoff.plan`, checked; see there. mem_limit: None if none was given."""

    modes: tuple[str, ...]
    mem_limit: int | None
    optimizer: str
    mem_slots: int
    host_bandwidth: float
    master_weights: bool = False

    @classmethod
    def read(
        cls,
        modes: Iterable[str] | str,
        mem_limit: Any,
        optimizer: str,
        mem_slots: int,
        host_bandwidth: float,
        master_weights: bool = False,
    ) -> Question:
        """The question that these arguments ask.

        Raises:
            OptionError, LimitError: for an invalid one.
        """
        check_optimizer(optimizer)
        check_flag("master_weights", master_weights)
        slots = parse_slots(mem_slots)
        if isinstance(host_bandwidth, bool) or not isinstance(host_bandwidth, (int, float)) or not host_bandwidth > 0:
            raise OptionError(f"host_bandwidth is {host_bandwidth!r}; give bytes per second above 0")
        limit = None if mem_limit is None else parse_bytes(mem_limit)
        return cls(parse_modes(modes), limit, optimizer, slots, host_bandwidth, master_weights)

    def whole(self, profile: Estimate, target: Device) -> WholeDevice:
        """What training a model of this profile takes on the device."""
        return whole_device(profile, target, self.optimizer, self.host_bandwidth, self.master_weights)


def answer(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Device,
    asked: Question,
    note: Callable[[float, str], None] = lambda *_: None,
) -> PlannedModes:
    """The answer to `asked`, for training `model` on `target`. note: is told what is done next."""
    with without_gc():  # one collection looks at all objects of the process, which takes as long as some stages
        note(0.0, "tracing the model")
        profile = estimated(model, sample, kwargs, target)
        grown = growth(model, sample, kwargs, target, profile)
        return planned_modes(profile, target, asked, grown, options_of(model), note=note)


def growth(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Device, profile: Estimate
) -> Growth | None:
    """How the estimate grows with the batch: the model is estimated again, at about the largest batch that fits. None
    if the sample has no batch, or the model does something else there."""
    leaves, rebuild = flatten((args, kwargs))
    if not (batch := batch_of(args, kwargs)):
        return None
    step = min_mem_limit(profile.chain, "joint")
    count = max(2 * batch, batch * usable_bytes(target.memory_bytes) // max(1, step))

    def larger(many: int) -> Estimate:
        def resized(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or not t.dim() or t.shape[0] != batch:
                return t
            return torch.empty(many, *t.shape[1:], dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)

        args, kwargs = rebuild([resized(leaf) for leaf in leaves])
        return estimated(model, args, kwargs, target)

    try:
        return Growth.of(larger, profile, batch, count)
    except MeasureError:
        return None


def options_of(model: nn.Module, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The options of a `Checkpointable` that a plan depends on; those `given` for another module."""
    return model._options.chosen if isinstance(model, ModuleProxy) else dict(given)


@dataclass(frozen=True)
class Needs:
    """The smallest numbers of bytes for which there is a plan.

    device: of the device's memory for training. step: of a `mem_limit`. parts: resident bytes, by name.
    """

    device: int
    step: int
    parts: dict[str, int]

    @property
    def resident(self) -> int:
        return sum(self.parts.values())


def least_bytes(profile: Estimate, target: Device, asked: Question) -> Needs:
    """What `planned_modes` needs to find a plan."""
    whole = asked.whole(profile, target)
    parts = resident_bytes(profile, whole, asked.optimizer)
    step = least_limit(profile, Request(usable_bytes(target.memory_bytes), "joint", asked.mem_slots, {}))
    plain = Steps(whole, 0).of(Setting()).peak_bytes
    placed = [whole.least(updates) for updates in WHEN] if profile.meta["parameter_bytes"] else []
    return Needs(min(plain, step + sum(parts.values()), *placed), step, parts)


def planned_modes(
    profile: Estimate,
    target: Device,
    asked: Question,
    grown: Growth | None,
    options: dict[str, Any],
    refine: bool | float = EFFORT,
    note: Callable[[float, str], None] = lambda *_: None,
) -> PlannedModes:
    """The table. grown: how costs grow with the batch, if that is known. options: of `Checkpointable`, for the setting.
    refine: as for `rotoff.solve`.

    Raises:
        LimitError: if no `mem_limit` was asked for, and nothing fits the device.
    """
    everything = keeping_all(profile)
    whole, usable = asked.whole(profile, target), usable_bytes(target.memory_bytes)
    whole = replace(whole, growth=grown and grown.moving)
    resident = resident_bytes(profile, whole, asked.optimizer)
    limit = max(0, usable - sum(resident.values()))
    limit = limit if asked.mem_limit is None else min(asked.mem_limit, limit)
    alone, movable = asked.mem_limit is not None, profile.meta["parameter_bytes"] > 0
    update_time = sum(group.update_time for group in whole.groups)
    make = Steps(whole, usable)
    if alone:
        make = Steps(WholeDevice(profile, beside=-profile.batch_bytes, growth=grown), limit, update_time)
    note(0.4, "other systems' settings")
    steps = make.elsewhere()
    note(0.5, "parameters placed")
    placed = placed_steps(whole, steps[0], usable) if movable and not alone else ()
    if not alone and limit <= 0 and not steps[0].fits and all(row.step_time is None for row in placed):
        raise _too_small(target, resident, placed)
    note(0.8, "activations")
    rows, own = _in_modes(profile, asked, limit, options, make, grown, refine)
    steps += own
    steps += [_device_step(row, usable, options) for row in placed if row.step_time is not None and not steps[0].fits]
    times = [row.step_time for row in rows if row.step_time is not None]
    request = Request(limit, "joint", asked.mem_slots, {})
    bound = min(least_time(profile, request, min(times)), *times) if times else None  # the same in all modes
    best = [row.bound_time for row in placed if row.bound_time is not None]
    return PlannedModes(
        chain=profile.chain,
        device=target.name,
        mem_limit=limit,
        keep_all_bytes=everything.peak,
        keep_all_time=everything.trace.makespan,
        resident_bytes=resident,
        device_bytes=target.memory_bytes,
        rows=tuple(row if row.step_time is None else replace(row, bound_time=bound) for row in rows),
        placed=placed,
        steps=tuple(steps),
        bound_time=min(best, default=None) if not alone else bound and bound + update_time,
        asked=alone,
        notes=_notes(whole, asked),
    )


def _in_modes(
    profile: Estimate,
    asked: Question,
    limit: int,
    options: dict[str, Any],
    make: Steps,
    grown: Growth | None,
    refine: bool | float,
) -> tuple[list[PlannedMode], list[PlannedStep]]:
    """A row for each mode, without its bound, and those of the table."""
    base = keeping_all(profile).trace.makespan
    rows, steps = [], []
    for mode in asked.modes:
        request = Request(limit, mode, asked.mem_slots, {"refine": refine})
        row, plan = _row(profile, request, base)
        rows.append(row)
        if plan is None or plan.execution.keeps_all:
            continue
        name, said = (
            ("rotoff, mem_limit", options)
            if mode == "joint"
            else (f"rotoff, mem_limit, mode {mode}", {"mode": mode, **options})
        )
        own = replace(make, whole=replace(make.whole, which=profile.chains.index(plan.found)))
        step = own.row(name, own.with_parameters_resident(plan.sequence), setting=_setting((as_size(limit),), said))
        most = None if grown is None else _most(request, grown, asked.mem_limit is None)
        steps.append(replace(step, fits=True, largest_batch=most))
    return rows, steps


def _device_step(row: PlacedStep, usable: int, options: dict[str, Any]) -> PlannedStep:
    """The row of a step that moves parameters."""
    during = {"updates": row.updates} if row.updates != "after" else {}
    said = {"device_limit": as_size(usable), "optimizer": Bare("optimizer"), **during, **options}
    name = ", ".join(["rotoff, device_limit", *(f"updates {when}" for when in during.values())])
    assert row.step_time is not None and row.peak_bytes is not None and row.overhead is not None
    held = row.peak_bytes, row.host_bytes or 0, row.step_time, row.overhead
    return PlannedStep(name, True, *held, row.largest_batch, row.moves, _setting((), said))


class Bare(str):
    """A name, shown without quotes."""

    __repr__ = str.__str__


def _setting(positional: tuple[Any, ...], options: dict[str, Any]) -> str:
    said = ["model", *map(repr, positional), *(f"{name}={value!r}" for name, value in options.items())]
    return f"rotoff.attach({', '.join(said)})"


def _most(request: Request, grown: Growth, with_batch: bool) -> int | None:
    """The largest batch that fits in the request's mode. with_batch: whether the limit is less with more of it."""

    def needs(count: int) -> int:
        profile = grown.at(count)
        more = profile.batch_bytes - grown.profile.batch_bytes if with_batch else 0
        return least_limit(profile, request) + more

    return largest_within(request.mem_limit, needs)


def _notes(whole: WholeDevice, asked: Question) -> tuple[str, ...]:
    """What the figures rest on."""
    small = {str(p.dtype).removeprefix("torch.") for p in whole.trained if p.element_size() < 4}
    states = ""
    if small and asked.master_weights:
        states = "; states and master weights in float32"
    elif small:
        states = f"; states in {' and '.join(sorted(small))} as the parameters, without float32 master weights"
    return (f"times are estimates, with the updates of {asked.optimizer}{states}",)


def check_optimizer(optimizer: str) -> None:
    """Raise OptionError for an unknown optimizer."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZER_STATES:
        raise OptionError(f"optimizer is {optimizer!r}; known ones are {', '.join(OPTIMIZER_STATES)}")


def _too_small(device: Device, resident: dict[str, int], placed: tuple[PlacedStep, ...]) -> LimitError:
    least = min((row.min_device_bytes for row in placed), default=sum(resident.values()))
    return LimitError(
        f"{device.name} has {format_bytes(device.memory_bytes)}, and {resident_parts(resident)} take"
        f" {format_bytes(sum(resident.values()))} of it; nothing is left for a step, and with those on the host a"
        f" device needs at least {format_bytes(least)}: {WAYS_ON}"
    )


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The first dimension of the first tensor, if there is one."""
    tensors = (t for t in flatten((args, kwargs))[0] if isinstance(t, torch.Tensor))
    first = next(tensors, None)
    return None if first is None or not first.dim() else first.shape[0]


def resident_bytes(profile: Estimate, whole: WholeDevice, optimizer: str) -> dict[str, int]:
    """Bytes on the device between steps, by name, if no parameters move."""
    meta = profile.meta
    states = OPTIMIZER_STATES[optimizer] * meta["trained_bytes"]
    return {
        "parameters": meta["parameter_bytes"],
        "buffers": meta["buffer_bytes"],
        "gradients": meta["trained_bytes"],
        f"{optimizer} states": states + whole.master_bytes,
        "batch": profile.batch_bytes,
    }


def _row(profile: Estimate, request: Request, base: float) -> tuple[PlannedMode, StepPlan | None]:
    """The row of a mode, without its bound, and its plan."""
    try:
        found = make_plan(profile, request)
    except InfeasibleError as error:
        return PlannedMode(request.mode, None, None, None, None, None, error.min_mem_limit), None
    time, least = found.trace.makespan, least_limit(profile, request)
    held = found.peak, found.trace.host_peak_bytes
    return PlannedMode(request.mode, time, time / base - 1 if base else 0.0, *held, None, least), found
