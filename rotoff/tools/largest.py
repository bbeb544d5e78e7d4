"""Finds the largest batch, the longest context, the deepest model or the cheapest device that works."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..core.sizes import format_bytes, parse_bytes
from ..errors import InfeasibleError, LimitError, MeasureError, OptionError
from ..planning.planner import least_limit, least_time, make_plan
from ..planning.request import Request
from ..profile.estimate.devices import Device, find
from ..profile.profile import Profile
from ..solver.slots import parse_slots
from .estimate import estimated
from .mode_comparison import check_optimizer, planned_modes, resident_bytes
from .plan import plan
from .planned_modes import PlannedModes, resident_parts, usable_bytes

MOST = 2**20
GROWTH = 16  # next size / largest that works, at most, while none has been refused
_PLACED = "With a device_limit a part may lie on the host (rotoff.plan)"
PATIENCE = 2  # answers in a row that do not halve the open interval, before the middle is tried


@dataclass(frozen=True)
class Largest:
    """The result of `largest`; prints as sentences.

    size: the largest size that works; 0 if none does.
    refused: the smallest size that is known not to work; None if all up to `most` work.
    proven: whether no plan can make `refused` work, on the estimated chain; if not, none was found.
    binds: why `refused` does not work, as a sentence.
    planned: the plan of `size`; None if no size works.
    tried: every size that was tried, and whether it works.
    """

    size: int
    refused: int | None
    proven: bool
    binds: str
    planned: PlannedModes | None
    tried: dict[int, bool]

    def __str__(self) -> str:
        if self.refused is None:
            return f"{self.size} works, and nothing larger was asked for"
        why = "cannot work" if self.proven else "was not found to work"
        return f"{self.size or 'nothing'} works; {self.refused} {why}: {self.binds}"


@dataclass(frozen=True)
class _Answer:
    """Whether a size works. margins: bytes and, if a step time was given, seconds that are left; it works if none is
    negative. why: makes the sentence that says why not. proven: whether no plan can make it work."""

    margins: dict[str, float]
    planned: Callable[[], PlannedModes]
    why: Callable[[], str] = str
    proven: bool = True

    @property
    def works(self) -> bool:
        return min(self.margins.values()) >= 0


@dataclass(frozen=True)
class _Question:
    build: Callable[[int], Any]
    device: Device
    mem_limit: int | None
    optimizer: str
    step_time: float | None
    mem_slots: int

    def ask(self, n: int) -> _Answer:
        """Whether size n works."""
        model, args, kwargs = read_built(self.build(n), n)
        try:
            profile = estimated(model, args, kwargs, self.device)
        except MeasureError as error:
            cure = "if the model takes no such size, give the largest that it takes as most="
            raise MeasureError(f"size {n}: {error}; {cure}") from error
        resident = resident_bytes(profile, self.optimizer)
        usable, used = usable_bytes(self.device.memory_bytes), sum(resident.values())
        room = usable - used
        limit = room if self.mem_limit is None else min(room, self.mem_limit)
        asked = self.mem_limit, resident, (), ("joint",), self.mem_slots, True
        planned = partial(planned_modes, profile, self.device, *asked)
        taken = (
            f"resident bytes take {format_bytes(used)} ({resident_parts(resident)}) of the {format_bytes(usable)} that"
            f" {self.device.name} has for training"
        )
        if limit <= 0:
            return _Answer({"bytes": limit - 1}, planned, lambda: f"{taken}. {_PLACED}")
        request = Request(limit, "joint", self.mem_slots, {})
        margins: dict[str, float] = {"bytes": limit - least_limit(profile, request)}
        if margins["bytes"] < 0:
            return _Answer(margins, planned, partial(_refusal, profile, request, taken if limit == room else ""))
        if self.step_time is None:
            return _Answer(margins, planned)
        bound = least_time(profile, request)
        if bound > self.step_time:
            why = f"no plan within {format_bytes(limit)} is faster than {bound:.4g} s a step"
            return _Answer({**margins, "seconds": self.step_time - bound}, planned, lambda: why)
        found = make_plan(profile, request).trace.makespan
        why = f"the best plan found within {format_bytes(limit)} takes {found:.4g} s a step, the bound is {bound:.4g} s"
        return _Answer({**margins, "seconds": self.step_time - found}, planned, lambda: why, proven=False)


def _refusal(profile: Profile, request: Request, taken: str) -> str:
    """Why no plan keeps the request's limit. taken: by resident bytes, if these leave no more than the limit."""
    try:
        make_plan(profile, request)
    except InfeasibleError as error:
        return f"{taken}, and the rest is the limit: {error}. {_PLACED}" if taken else str(error)
    raise AssertionError(f"a plan within {request.mem_limit} bytes, which are too few")


def largest(
    build: Callable[[int], Any],
    *,
    device: Device | str = "H200",
    mem_limit: int | str | None = None,
    step_time: float | None = None,
    optimizer: str = "adam",
    step: int = 1,
    most: int = MOST,
    mem_slots: int = 50,
) -> Largest:
    """Find the largest batch, context or depth that trains on a device, without the device and without memory.

    ``rotoff.largest(lambda n: (model, torch.empty(n, 1024, device="meta")), device="RTX 4090")`` is the largest batch.
    A larger size must need more. Parameters, gradients and optimizer states stay on the device; `rotoff.plan` says what
    a ``device_limit``, which moves them, makes possible.

    Args:
        build: called with a size, returns (model, sample), as the command line's function does; the size may be that of
            the sample (batch, context) or of the model (depth). Make both on the device "meta". The model may be a
            `Checkpointable` with ``stages=`` or ``backward_from=``.
        device, mem_limit, optimizer, mem_slots: as for `rotoff.plan`; resident bytes count.
        step_time: most estimated seconds of a step.
        step: sizes are multiples of it.
        most: the largest size to try. Give the longest context that the model takes: whether an embedding's table is
            long enough is not checked, since indices on "meta" have no values.

    Raises:
        OptionError: for sizes that are no whole numbers from 1, or a `build` that returns something else. Others: as
            for `rotoff.plan`.
    """
    for name, value in (("step", step), ("most", most)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{name} is {value!r}; give a whole number from 1")
    if not callable(build) or isinstance(build, nn.Module):
        raise OptionError(f"build is a {type(build).__name__}; give a function of a size that returns (model, sample)")
    check_sized(build, "build")
    check_optimizer(optimizer)
    _check_step_time(step_time)
    parse_slots(mem_slots)
    if most < step:
        raise OptionError(f"most is {most}, and sizes are multiples of {step}; give a larger most")
    asked = None if mem_limit is None else parse_bytes(mem_limit)
    question = _Question(build, find(device), asked, optimizer, step_time, mem_slots)
    tried = _searched(lambda times: question.ask(times * step), most // step)
    low = max((n for n, answer in tried.items() if answer.works), default=0)
    refused = tried.get(low + 1)
    return Largest(
        size=low * step,
        refused=None if refused is None else (low + 1) * step,
        proven=refused is None or refused.proven,
        binds="" if refused is None else refused.why(),
        planned=tried[low].planned() if low else None,
        tried={n * step: answer.works for n, answer in sorted(tried.items())},
    )


def check_sized(build: Callable[..., Any], name: str) -> None:
    """Raise OptionError if `build`, called `name` in the error, cannot be called with a size."""
    try:
        inspect.signature(build).bind(1)
    except TypeError as error:
        raise OptionError(
            f"{name} cannot be called with a size ({error}); give a function such as build(n) that returns"
            " (model, sample)"
        ) from None


def _check_step_time(step_time: float | None) -> None:
    if step_time is not None and (
        isinstance(step_time, bool) or not isinstance(step_time, (int, float)) or not step_time > 0
    ):
        raise OptionError(f"step_time is {step_time!r}; give seconds above 0, or None for any")


def _searched(ask: Callable[[int], _Answer], last: int) -> dict[int, _Answer]:
    """Answers by number, among them those of the largest number up to `last` that works and of the next one.

    Margins fall about as a line or a parabola, so the next number is where a line through two answers meets 0; if that
    converges slowly, the middle of the open interval.
    """
    tried = {1: ask(1)}
    low, high = (1, last + 1) if tried[1].works else (0, 1)
    slow = 0
    while low + 1 < high:
        most = high - 1 if high in tried else min(GROWTH * low, last)
        guess = (low + most + 1) // 2 if slow == PATIENCE else min(_roots(tried), default=most)
        guess = max(low + 1, min(guess, most)) if len(tried) > 1 else 2
        tried[guess] = ask(guess)
        before = high - low
        low, high = (guess, high) if tried[guess].works else (low, guess)
        slow = 0 if 2 * (high - low) <= before or slow == PATIENCE else slow + 1
    return tried


def _roots(tried: dict[int, _Answer]) -> Iterator[int]:
    """For each margin, the largest number at which the line through its two answers nearest to 0 is not negative."""
    for name in {name for answer in tried.values() for name in answer.margins}:
        known = [
            (abs(found), n, found) for n, answer in tried.items() if (found := answer.margins.get(name)) is not None
        ]
        if len(known) > 1:
            (_, n, found), (_, other, there) = sorted(known)[:2]
            slope = (there - found) / (other - n)
            if slope < 0:
                yield math.floor(n - found / slope)


def cheapest(
    model: nn.Module,
    *sample: Any,
    devices: Iterable[Device | str],
    step_time: float | None = None,
    mem_limit: int | str | None = None,
    optimizer: str = "adam",
    **kwargs: Any,
) -> PlannedModes:
    """The first device of a list on which the model trains, with its plan; list the cheapest first.

    As for `largest`, parameters, gradients and optimizer states stay on the device.

    Args:
        model, sample, mem_limit, optimizer, kwargs: as for `rotoff.plan`; the mode is "joint".
        devices: names or `Device`, in the order of your preference.
        step_time: most estimated seconds of a step.

    Raises:
        InfeasibleError: if it trains on none of them; the message has a reason for each. OptionError: for an unknown
            device.
    """
    _check_step_time(step_time)
    if refused := sorted({"modes", "pipeline"} & {*kwargs}):
        raise OptionError(f"{refused[0]} is no argument of cheapest, which plans in mode joint; use rotoff.plan")
    devices = (devices,) if isinstance(devices, (str, Device)) else devices
    if not isinstance(devices, Iterable):
        raise OptionError(f"devices is {devices!r}; give names or Devices, such as rotoff.devices()")
    targets = [find(device) for device in devices]
    if not targets:
        raise OptionError("devices is empty; give at least one, such as rotoff.devices()")
    reasons, least = [], []
    for target in targets:
        try:
            found = plan(
                model, *sample, mem_limit=mem_limit, device=target, modes="joint", optimizer=optimizer, **kwargs
            )
        except LimitError as error:
            reasons.append(str(error))
            continue
        assert isinstance(found, PlannedModes)  # of one device
        time, row = found["joint"].step_time, found["joint"]
        least.append(row.min_mem_limit)
        if not found.fits or time is None:
            reasons.append(f"{target.name}: {found.verdict}")
        elif step_time is not None and time > step_time:
            reasons.append(
                f"{target.name}: a step takes {time:.4g} s, and no plan takes less than {row.bound_time:.4g} s"
            )
        else:
            return found
    said = f"none of the devices works with a mem_limit. {'. '.join(reasons)}"
    raise InfeasibleError(said, min(least, default=0))


def read_built(made: Any, n: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments from `made`, the result of ``build(n)``.

    Raises:
        OptionError: if that is not (model, sample).
    """
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise OptionError(f"build({n}) returned {type(made).__name__}; it must return (model, sample)")
    model, sample = made
    if isinstance(sample, Mapping):
        return model, (), dict(sample)
    return model, sample if isinstance(sample, tuple) else (sample,), {}
