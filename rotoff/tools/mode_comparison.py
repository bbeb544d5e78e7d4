"""The cost of training a model within a limit on a device, without the device: ``print(rotoff.plan(...))``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..checkpointable import Checkpointable
from ..core.chain import Chain
from ..core.sizes import format_bytes, parse_bytes
from ..errors import InfeasibleError, LimitError, OptionError, nearest
from ..io.cache import Cache
from ..io.json_file import save_json
from ..planning.memory_account import reported_bytes
from ..planning.planner import least_limit, least_time, make_plan, plan_everything
from ..planning.request import Request
from ..profile.estimate.devices import Device, find
from ..profile.memory.allocator import without_gc
from ..profile.profile import Profile
from ..solver.bounds import MODES, parse_modes
from ..solver.search import Shared
from ..solver.slots import parse_slots
from ..tensors.tree import flatten
from .estimate import check_module, estimated
from .kept_plan import find_plan, keep_plan, plan_key
from .pipeline_plan import Asked, PlannedPipeline, planned_pipeline
from .whole_device import EFFORT, HEAD, PlacedStep, placed_steps, with_parameters

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # states per parameter element
_WAYS_ON = (
    "take a device with more memory, a smaller batch, an optimizer with fewer states, parameters in bfloat16, or"
    " adapters on frozen parameters, or shard the model over several devices (FSDP2)"
)
HOST_BANDWIDTH = 40e9  # B/s of two channels of DDR5, half of which the link takes
MARGIN = 0.06  # share of the device's memory for the context, libraries' workspaces and fragmentation


@dataclass(frozen=True)
class PlannedMode:
    """One mode within the limit; fields that depend on a plan are None if nothing fits.

    step_time: estimated seconds.
    overhead: step_time over that of keeping everything, less 1.
    peak_bytes: the most on the device, without resident bytes, as the limit.
    host_bytes: the most on the host.
    bound_time: seconds that no sequence within the limit can beat.
    min_mem_limit: the smallest limit that works in this mode.
    """

    mode: str
    step_time: float | None
    overhead: float | None
    peak_bytes: int | None
    host_bytes: int | None
    bound_time: float | None
    min_mem_limit: int


@dataclass(frozen=True)
class PlannedModes:
    """Rows of `PlannedMode`; prints as a table.

    chain: the estimated chain.
    mem_limit: bytes that a step may allocate, at most those that resident bytes leave; 0 if these fill the device.
    keep_all_bytes: the peak of keeping everything.
    resident_bytes: parameters and buffers, gradients, optimizer states and the batch, by name; the limit does not count
        them.
    device_bytes: size of the device's memory.
    placed: training within the device's memory where parameters, gradients and optimizer states move too, with updates
        "after" the backward and "during" it; empty if a `mem_limit` was given.
    """

    chain: Chain
    device: str
    mem_limit: int
    keep_all_bytes: int
    keep_all_time: float
    resident_bytes: dict[str, int]
    device_bytes: int
    rows: tuple[PlannedMode, ...]
    placed: tuple[PlacedStep, ...] = ()

    def __iter__(self) -> Iterator[PlannedMode]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, mode: str) -> PlannedMode:
        for row in self.rows:
            if row.mode == mode:
                return row
        raise KeyError(mode)

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device must have: the resident ones, and the peak of the fastest mode, or the smallest limit if
        no mode fits."""
        return sum(self.resident_bytes.values()) + self._step_bytes

    @property
    def _step_bytes(self) -> int:
        found = [(row.step_time, row.peak_bytes or 0) for row in self.rows if row.step_time is not None]
        return min(found)[1] if found else min(row.min_mem_limit for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether any of the modes has a plan within `mem_limit`, with the resident bytes on the device."""
        return any(row.step_time is not None for row in self.rows)

    @property
    def verdict(self) -> str:
        """Whether the training fits, of which bytes it consists, and what to change if it does not fit."""
        least, usable = self._step_bytes, usable_bytes(self.device_bytes)
        has = f"{resident_parts(self.resident_bytes)} and {format_bytes(least)} for the step take"
        has = f"{has} {format_bytes(self.needed_bytes)}"
        of = (
            f"the {format_bytes(usable)} that {self.device} has for training ({format_bytes(self.device_bytes)}, less"
            f" {MARGIN:.0%} for context and libraries)"
        )
        if self.fits:
            return f"fits: {has} of {of}"
        times = [row.step_time for row in self.placed if row.step_time is not None]
        if times:
            return (
                f"fits only with a device_limit, at {min(times):.4g} s a step: {has}, more than {of}, and partly lie on"
                " the host"
            )
        if self.needed_bytes > usable:
            return f"DOES NOT FIT: {has} with even the smallest limit, more than {of}; {_WAYS_ON}"
        left = least + usable - self.needed_bytes
        cure = f"mem_limit may be from {least} to {left} bytes, {format_bytes(left)}"
        return f"DOES NOT FIT in {format_bytes(self.mem_limit)}; {cure}"

    @property
    def works(self) -> bool:
        """Whether there is a plan that fits the device's memory, be it with parameters on the host."""
        return self.fits or any(row.step_time is not None for row in self.placed)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, without the chain."""
        return {
            "format": "rotoff.planned_modes",
            "version": 1,
            "meta": dict(self.chain.meta),
            "device": self.device,
            "device_bytes": self.device_bytes,
            "mem_limit": self.mem_limit,
            "keep_all_bytes": self.keep_all_bytes,
            "keep_all_time": self.keep_all_time,
            "resident_bytes": self.resident_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "modes": [asdict(row) for row in self.rows],
            "placed": [asdict(row) for row in self.placed],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON to `path`."""
        save_json(path, self.to_dict())

    def __str__(self) -> str:
        head = (
            f"{'mode':<8} {'step s':>10} {'overhead':>9} {'bound':>9} {'peak':>11} {'host':>11} {'smallest limit':>15}"
        )
        within = f" within {format_bytes(self.mem_limit)}" if self.mem_limit else ""
        lines = [
            self.verdict,
            f"{self.chain.name or 'model'} on {self.device}{within} (times are estimates)",
            f"keeping everything: {format_bytes(self.keep_all_bytes)}, {self.keep_all_time:.4g} s a step",
            *([head] if within else []),
        ]
        for row in self.rows if within else ():
            start, end = f"{row.mode:<8} ", f" {format_bytes(row.min_mem_limit):>15}"
            if row.step_time is None:
                lines.append(f"{start}{'does not fit':<54}{end}")
                continue
            assert row.overhead is not None and row.bound_time is not None
            bound = max(0.0, row.bound_time / self.keep_all_time - 1) if self.keep_all_time else 0.0
            lines.append(
                f"{start}{row.step_time:>10.4g} {100 * row.overhead:>+8.1f}% {100 * bound:>+8.1f}%"
                f" {format_bytes(row.peak_bytes or 0):>11} {format_bytes(row.host_bytes or 0):>11}{end}"
            )
        if self.placed:
            usable = format_bytes(usable_bytes(self.device_bytes))
            lines += [f"parameters, gradients and states placed too, within {usable} in all:", HEAD]
            lines += map(str, self.placed)
        return "\n".join(lines)


def plan(
    model: nn.Module,
    *sample: Any,
    mem_limit: int | str | None = None,
    device: Device | str = "H200",
    modes: Iterable[str] | str = MODES,
    optimizer: str = "adam",
    mem_slots: int = 50,
    host_bandwidth: float = HOST_BANDWIDTH,
    pipeline: int | None = None,
    microbatches: int = 1,
    schedule: str = "1F1B",
    chunks: int = 1,
    ranks_per_link: int = 1,
    cache_directory: str | os.PathLike[str] | bool | None = True,
    **kwargs: Any,
) -> PlannedModes | PlannedPipeline:
    """Estimate the cost of a training step within `mem_limit` on `device`, without the device and without memory.

    Without a `mem_limit` it also plans the whole training within the device's memory, where parameters, gradients and
    optimizer states may lie on the host: the step time, the host's bytes, the smallest device, the largest batch.

    Args:
        model, sample, kwargs: as for `rotoff.estimate`.
        mem_limit: bytes that one step may allocate beyond parameters, their gradients, optimizer states and the batch,
            as for `Checkpointable`. None, and at most: the device's memory less those and a margin.
        device: a name (``rotoff.devices()`` lists them) or a `Device`.
        modes: any of "joint", "remat", "offload", or one of them.
        mem_slots: as for `rotoff.solve`.
        optimizer: "sgd", "momentum", "adam" or "adamw"; its states count as resident bytes.
        host_bandwidth: B/s of the host's memory while the link is busy, for updates on the host.
        pipeline: number of ranks of a pipeline, each with such a device. The result then has a row for each rank, and
            the step time of the pipeline, bubbles included. The sample is the whole batch; each of its tensors is split
            into `microbatches` along its first dimension. `mem_limit` is for each rank.
        schedule: "GPipe", "1F1B" or "Interleaved1F1B". chunks: stages of each rank. ranks_per_link: neighbours that
            share a link to the host.
        cache_directory: where the answer, unless it is a pipeline's, is kept for the next process; as for
            `Checkpointable`.

    Raises:
        OptionError: for an unknown device, mode or optimizer; the message names the known ones.
        LimitError: if `mem_limit` is not a number of bytes, or nothing fits the device.
        MeasureError: if the model cannot be estimated.
    """
    target = find(device)
    _check(model, optimizer, host_bandwidth, mem_slots)
    _check_names(model, kwargs)
    wanted = parse_modes(modes)
    asked = None if mem_limit is None else parse_bytes(mem_limit)
    usable = usable_bytes(target.memory_bytes)
    if pipeline is not None:
        ranks = Asked(pipeline, microbatches, schedule, chunks, ranks_per_link)
        return planned_pipeline(model, sample, kwargs, target, ranks, asked, usable, optimizer, host_bandwidth)
    return _known(
        model, sample, kwargs, target, Cache.of(cache_directory), (wanted, asked, optimizer, mem_slots, host_bandwidth)
    )


Question = tuple[tuple[str, ...], int | None, str, int, float]  # modes, mem_limit, optimizer, mem_slots, host_bandwidth


def _known(
    model: nn.Module, sample: tuple[Any, ...], kwargs: dict[str, Any], target: Device, cache: Cache, question: Question
) -> PlannedModes:
    """The answer in `cache`, else a new one, which is kept there."""
    key = plan_key(model, sample, kwargs, target, question) if cache.directory is not None else None
    if (known := find_plan(cache, key, _read)) is not None:
        return known
    with without_gc():  # one collection looks at all objects of the process, which takes as long as some stages
        found = _planned(model, sample, kwargs, target, *question)
    keep_plan(cache, key, _written(found))
    return found


def _written(found: PlannedModes) -> dict[str, Any]:
    """`found` in JSON values."""
    rows = {"rows": [*map(asdict, found.rows)], "placed": [*map(asdict, found.placed)]}
    return {**vars(found), **rows, "chain": found.chain.to_dict()}


def _read(written: dict[str, Any]) -> PlannedModes:
    """The reverse of `_written`."""
    rows, placed = (PlannedMode(**row) for row in written["rows"]), (PlacedStep(**row) for row in written["placed"])
    return PlannedModes(
        **{**written, "chain": Chain.from_dict(written["chain"]), "rows": tuple(rows), "placed": tuple(placed)}
    )


def _planned(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Device,
    modes: tuple[str, ...],
    asked: int | None,
    optimizer: str,
    mem_slots: int,
    host_bandwidth: float,
) -> PlannedModes:
    """The answer to a question that `plan` has checked."""
    profile = estimated(model, sample, kwargs, target)
    placed: tuple[PlacedStep, ...] = ()
    usable = usable_bytes(target.memory_bytes)
    if asked is None and profile.chain.meta["parameter_bytes"]:
        chain, constant = with_parameters(profile, target, optimizer, host_bandwidth)
        placed = placed_steps(chain, constant, usable, MARGIN, _batch(sample, kwargs))
    resident = resident_bytes(profile, optimizer)
    return planned_modes(profile, target, asked, resident, placed, modes, mem_slots)


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
    shared = Shared()
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


def _check(model: nn.Module, optimizer: str, host_bandwidth: float, mem_slots: int) -> None:
    check_module(model)
    check_optimizer(optimizer)
    parse_slots(mem_slots)
    if isinstance(host_bandwidth, bool) or not isinstance(host_bandwidth, (int, float)) or not host_bandwidth > 0:
        raise OptionError(f"host_bandwidth is {host_bandwidth!r}; give bytes per second above 0")


def _check_names(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise OptionError for a name that neither `plan` nor the model's forward takes."""
    inner = model._model if isinstance(model, Checkpointable) else model
    if not kwargs or isinstance(inner, torch.jit.ScriptModule):
        return
    takes = inspect.signature(inner.forward).parameters.values()
    unknown = sorted({*kwargs} - {one.name for one in takes})
    if not unknown or any(one.kind is one.VAR_KEYWORD for one in takes):
        return
    name = unknown[0]
    if name in inspect.signature(Checkpointable).parameters:
        raise OptionError(f"{name} is an option of Checkpointable; give Checkpointable(model, {name}=...) as the model")
    said = f"{name} is no argument of rotoff.plan, nor of the forward of {type(inner).__name__}"
    raise OptionError(said + nearest(name, inspect.signature(plan).parameters))


def _too_small(device: Device, resident: dict[str, int], placed: tuple[PlacedStep, ...]) -> LimitError:
    least = min((row.min_device_bytes for row in placed), default=sum(resident.values()))
    return LimitError(
        f"{device.name} has {format_bytes(device.memory_bytes)}, and {resident_parts(resident)} take"
        f" {format_bytes(sum(resident.values()))} of it; nothing is left for a step, and with those on the host a"
        f" device needs at least {format_bytes(least)}: {_WAYS_ON}"
    )


def _batch(sample: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The first dimension of the first tensor."""
    tensors = [t for t in flatten((sample, kwargs))[0] if isinstance(t, torch.Tensor)]
    return tensors[0].shape[0] if tensors and tensors[0].dim() else None


def usable_bytes(device_bytes: int) -> int:
    """The part of a device's memory that a training process can use."""
    return int(device_bytes * (1 - MARGIN))


def resident_parts(resident: dict[str, int]) -> str:
    """`resident` as text."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in resident.items() if size)


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
