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
from ..planning.memory_account import reported_bytes
from ..planning.options import check_flag
from ..planning.planner import least_limit, least_time, make_plan, plan_everything
from ..planning.request import Request
from ..profile.estimate.devices import Device
from ..profile.memory.allocator import without_gc
from ..profile.profile import Profile
from ..runtime.execution_plan import ExecutionPlan
from ..solver.search import SharedProblems
from ..solver.settings import Setting
from ..solver.slots import parse_slots
from ..tensors.tree import flatten
from .estimate import estimated
from .planned_modes import WAYS_ON, PlacedStep, PlannedMode, PlannedModes, PlannedStep, resident_parts, usable_bytes
from .planned_steps import Steps
from .whole_device import (
    EFFORT,
    OPTIMIZER_STATES,
    Growth,
    WholeDevice,
    largest_batch,
    largest_count,
    placed_steps,
    proportional,
    whole_device,
)


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

    def whole(self, profile: Profile, target: Device) -> WholeDevice:
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
        grown = growth(model, sample, kwargs, target, asked.whole(profile, target))
        return planned_modes(profile, target, asked, grown, options_of(model), note=note)


def growth(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Device, whole: WholeDevice
) -> Growth | None:
    """How the costs of `whole` grow with the batch: the model is estimated again, at about the largest batch that fits.
    None if the sample has no batch, or the model has other stages there."""
    leaves, rebuild = flatten((args, kwargs))
    if not (batch := batch_of(args, kwargs)):
        return None
    count = largest_batch(whole, proportional(batch), usable_bytes(target.memory_bytes), "after") or 0
    count = count if count > batch else 2 * batch

    def resized(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.dim() or t.shape[0] != batch:
            return t
        return torch.empty(count, *t.shape[1:], dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)

    try:
        args, kwargs = rebuild([resized(leaf) for leaf in leaves])
        larger = estimated(model, args, kwargs, target)
    except MeasureError:
        return None
    one, other = whole.profile, larger
    alike = [(s.name, len(s.forms)) for s in one.chain.stages] == [(s.name, len(s.forms)) for s in other.chain.stages]
    return Growth(batch, count, larger) if alike and len(one.skips) == len(other.skips) else None


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


def least_bytes(profile: Profile, target: Device, asked: Question) -> Needs:
    """What `planned_modes` needs to find a plan."""
    whole = asked.whole(profile, target)
    parts = resident_bytes(whole, asked.optimizer)
    step = least_limit(profile, Request(usable_bytes(target.memory_bytes), "joint", asked.mem_slots, {}))
    plain = plain_steps(whole, 0).of(Setting()).peak_bytes
    placed = [whole.least(updates) for updates in WHEN] if profile.chain.meta["parameter_bytes"] else []
    return Needs(min(plain, step + sum(parts.values()), *placed), step, parts)


def plain_steps(whole: WholeDevice, limit: int) -> Steps:
    """Makes rows with the skip connections where the plain model has them."""
    return Steps(whole.keeping(plan_everything(whole.profile).kept), limit)


def planned_modes(
    profile: Profile,
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
    everything = plan_everything(profile)
    whole, usable = replace(asked.whole(profile, target), growth=grown), usable_bytes(target.memory_bytes)
    resident = resident_bytes(whole, asked.optimizer)
    limit = max(0, usable - sum(resident.values()))
    limit = limit if asked.mem_limit is None else min(asked.mem_limit, limit)
    alone, movable = asked.mem_limit is not None, profile.chain.meta["parameter_bytes"] > 0
    update_time = sum(group.update_time for group in whole.chain.parameters)
    make = plain_steps(whole, usable)
    if alone:
        make = Steps(make.whole.activations, limit, update_time)
    note(0.4, "other systems' settings")
    steps = make.elsewhere()
    note(0.5, "parameters placed")
    placed = placed_steps(whole, steps[0], usable) if movable and not alone else ()
    if not alone and limit <= 0 and not steps[0].fits and all(row.step_time is None for row in placed):
        raise _too_small(target, resident, placed)
    note(0.8, "activations")
    make = replace(make, whole=whole.activations if alone else whole)
    rows, own = _in_modes(profile, asked, limit, options, make, 0 if alone else resident["batch"], refine)
    steps += own
    steps += [_device_step(row, usable, options) for row in placed if row.step_time is not None and not steps[0].fits]
    times = [row.step_time for row in rows if row.step_time is not None]
    request = Request(limit, "joint", asked.mem_slots, {})
    bound = least_time(profile, request, min(times)) if times else None  # the same in all modes
    best = [row.bound_time for row in placed if row.bound_time is not None]
    return PlannedModes(
        chain=profile.chain,
        device=target.name,
        mem_limit=limit,
        keep_all_bytes=reported_bytes(profile, everything),
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
    profile: Profile,
    asked: Question,
    limit: int,
    options: dict[str, Any],
    make: Steps,
    batch_bytes: int,
    refine: bool | float,
) -> tuple[list[PlannedMode], list[PlannedStep]]:
    """A row for each mode, without its bound, and those of the table. batch_bytes: as for `_most`."""
    base, grown, shared = plan_everything(profile).trace.makespan, make.whole.growth, SharedProblems()
    rows, steps = [], []
    for mode in asked.modes:
        request = Request(limit, mode, asked.mem_slots, {"refine": refine}, shared=shared)
        row, plan = _row(profile, request, base)
        rows.append(row)
        if plan is None or plan.keeps_all:
            continue
        name, said = (
            ("rotoff, mem_limit", options)
            if mode == "joint"
            else (f"rotoff, mem_limit, mode {mode}", {"mode": mode, **options})
        )
        own = replace(make, whole=make.whole.keeping(plan.kept, plan.compact))
        step = own.row(name, own.with_parameters_resident(plan.sequence), setting=_setting((as_size(limit),), said))
        most = None if grown is None else _most(profile, request, grown, batch_bytes)
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


def _most(profile: Profile, request: Request, grown: Growth, batch_bytes: int) -> int | None:
    """The largest batch that fits in the request's mode. batch_bytes: of the sample, if the limit is less with more."""

    def fits(count: int) -> bool:
        more = batch_bytes * (count - grown.batch) // grown.batch
        return least_limit(grown.at(profile, count), request) <= request.mem_limit - more

    return largest_count(fits, grown.batch)


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


def resident_bytes(whole: WholeDevice, optimizer: str) -> dict[str, int]:
    """Bytes on the device between steps, by name, if no parameters move."""
    meta = whole.profile.chain.meta
    states = OPTIMIZER_STATES[optimizer] * meta["trained_bytes"]
    return {
        "parameters": meta["parameter_bytes"],
        "buffers": meta["buffer_bytes"],
        "gradients": meta["trained_bytes"],
        f"{optimizer} states": states + whole.master_bytes,
        "batch": whole.profile.resident_input_bytes,
    }


def _row(profile: Profile, request: Request, base: float) -> tuple[PlannedMode, ExecutionPlan | None]:
    """The row of a mode, without its bound, and its plan."""
    try:
        found = make_plan(profile, request)
    except InfeasibleError as error:
        return PlannedMode(request.mode, None, None, None, None, None, error.min_mem_limit), None
    time, least = found.trace.makespan, least_limit(profile, request)
    held = reported_bytes(profile, found), found.trace.host_peak_bytes
    return PlannedMode(request.mode, time, time / base - 1 if base else 0.0, *held, None, least), found
