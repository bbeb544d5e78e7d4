"""Finds the answer to a question of `rotoff.plan`: estimates the model and plans it in each mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..core.modes import parse_modes
from ..core.sizes import format_bytes, parse_bytes
from ..errors import InfeasibleError, LimitError, OptionError
from ..planning.memory_account import reported_bytes
from ..planning.planner import least_limit, least_time, make_plan, plan_everything
from ..planning.request import Request
from ..profile.estimate.devices import Device
from ..profile.memory.allocator import without_gc
from ..profile.profile import Profile
from ..solver.search import SharedProblems
from ..solver.slots import parse_slots
from ..tensors.tree import flatten
from .estimate import estimated
from .planned_modes import WAYS_ON, PlacedStep, PlannedMode, PlannedModes, resident_parts, usable_bytes
from .whole_device import EFFORT, placed_steps, with_parameters

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # states per parameter element


@dataclass(frozen=True)
class Question:
    """Arguments of `rotoff.plan`, checked; see there. mem_limit: None if none was given."""

    modes: tuple[str, ...]
    mem_limit: int | None
    optimizer: str
    mem_slots: int
    host_bandwidth: float

    @classmethod
    def read(
        cls, modes: Iterable[str] | str, mem_limit: Any, optimizer: str, mem_slots: int, host_bandwidth: float
    ) -> Question:
        """The question that these arguments ask.

        Raises:
            OptionError, LimitError: for an invalid one.
        """
        check_optimizer(optimizer)
        slots = parse_slots(mem_slots)
        if isinstance(host_bandwidth, bool) or not isinstance(host_bandwidth, (int, float)) or not host_bandwidth > 0:
            raise OptionError(f"host_bandwidth is {host_bandwidth!r}; give bytes per second above 0")
        limit = None if mem_limit is None else parse_bytes(mem_limit)
        return cls(parse_modes(modes), limit, optimizer, slots, host_bandwidth)


def answer(
    model: nn.Module, sample: tuple[Any, ...], kwargs: dict[str, Any], target: Device, asked: Question
) -> PlannedModes:
    """The answer to `asked`, for training `model` on `target`."""
    with without_gc():  # one collection looks at all objects of the process, which takes as long as some stages
        profile = estimated(model, sample, kwargs, target)
        placed: tuple[PlacedStep, ...] = ()
        usable = usable_bytes(target.memory_bytes)
        if asked.mem_limit is None and profile.chain.meta["parameter_bytes"]:
            chain, constant, streamable = with_parameters(profile, target, asked.optimizer, asked.host_bandwidth)
            placed = placed_steps(profile, chain, constant, streamable, usable, _batch(sample, kwargs))
        resident = resident_bytes(profile, asked.optimizer)
        return planned_modes(profile, target, asked.mem_limit, resident, placed, asked.modes, asked.mem_slots)


def planned_modes(
    profile: Profile,
    target: Device,
    asked: int | None,
    resident: dict[str, int],
    placed: tuple[PlacedStep, ...],
    modes: Iterable[str],
    mem_slots: int,
    refine: bool | float = EFFORT,
) -> PlannedModes:
    """One row for each of `modes`, within the usable memory less `resident` bytes, and within `asked` bytes. refine: as
    for `rotoff.solve`."""
    limit = usable_bytes(target.memory_bytes) - sum(resident.values())
    if asked is not None:
        limit = min(asked, limit)
    elif limit <= 0 and all(row.step_time is None for row in placed):
        raise _too_small(target, resident, placed)
    limit = max(0, limit)
    everything = plan_everything(profile)
    base = everything.trace.makespan
    shared = SharedProblems()
    requests = [Request(limit, mode, mem_slots, {"refine": refine}, shared=shared) for mode in modes]
    rows = [_row(profile, request, base) for request in requests]
    times = [row.step_time for row in rows if row.step_time is not None]
    bound = least_time(profile, requests[0], min(times)) if times else None  # the same in all modes
    return PlannedModes(
        chain=profile.chain,
        device=target.name,
        mem_limit=limit,
        keep_all_bytes=reported_bytes(profile, everything),
        keep_all_time=base,
        resident_bytes=resident,
        device_bytes=target.memory_bytes,
        rows=tuple(row if row.step_time is None else replace(row, bound_time=bound) for row in rows),
        placed=placed,
    )


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


def _batch(sample: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The first dimension of the first tensor."""
    tensors = [t for t in flatten((sample, kwargs))[0] if isinstance(t, torch.Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else None


def resident_bytes(profile: Profile, optimizer: str) -> dict[str, int]:
    """Bytes on the device between steps, by name."""
    meta = profile.chain.meta
    trained = meta["trained_bytes"]
    return {
        "parameters": meta["parameter_bytes"],
        "buffers": meta["buffer_bytes"],
        "gradients": trained,
        f"{optimizer} states": OPTIMIZER_STATES[optimizer] * trained,
        "batch": profile.resident_input_bytes,
    }


def _row(profile: Profile, request: Request, base: float) -> PlannedMode:
    """The row of a mode, without its bound."""
    least = least_limit(profile, request)
    try:
        found = make_plan(profile, request)
    except InfeasibleError as error:
        return PlannedMode(request.mode, None, None, None, None, None, error.min_mem_limit)
    time = found.trace.makespan
    held = reported_bytes(profile, found), found.trace.host_peak_bytes
    return PlannedMode(request.mode, time, time / base - 1 if base else 0.0, *held, None, least)
