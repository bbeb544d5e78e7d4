"""The inverse questions: the largest batch, the longest context, the deepest model, the cheapest device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.sizes import format_bytes, parse_bytes
from ..errors import InfeasibleError, LimitError, OptionError
from ..planning.planner import least_limit, least_time, make_plan
from ..planning.request import Request
from ..profile.estimate.devices import Device, find
from .estimate import estimated
from .mode_comparison import PlannedModes, plan, resident_bytes, usable_bytes

MOST = 2**20


@dataclass(frozen=True)
class Largest:
    """What `largest` found; prints as sentences.

    size: the largest that works; 0 if none does.
    refused: the smallest size that is known not to; None where all that were asked for work.
    proven: whether no plan can make `refused` work, on the estimated chain; otherwise none was found.
    binds: why not, as a sentence.
    planned: of `size`; None if none works.
    tried: every size that was looked at, and whether it works.
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
class _Question:
    build: Callable[[int], Any]
    device: Device
    mem_limit: int | None
    optimizer: str
    step_time: float | None
    mem_slots: int

    def ask(self, n: int) -> tuple[str, bool]:
        """Why size n does not work, and whether that is proven; an empty sentence if it does."""
        model, args, kwargs = read_built(self.build(n), n)
        profile = estimated(model, args, kwargs, self.device)
        resident = resident_bytes(profile, self.optimizer)
        room = usable_bytes(self.device.memory_bytes) - sum(resident.values())
        limit = room if self.mem_limit is None else min(room, self.mem_limit)
        if limit <= 0:
            return f"what is resident takes {format_bytes(sum(resident.values()))} of {self.device.name}'s memory", True
        request = Request(limit, "joint", self.mem_slots, {})
        if (least := least_limit(profile, request)) > limit:
            try:
                make_plan(profile, request)
            except InfeasibleError as error:
                return str(error), True
            raise AssertionError(f"a plan within {limit} bytes, where {least} are needed")
        if self.step_time is None:
            return "", False
        bound = least_time(profile, request)
        if bound > self.step_time:
            return f"no plan within {format_bytes(limit)} is faster than {bound:.4g} s a step", True
        if (found := make_plan(profile, request).trace.makespan) > self.step_time:
            took = f"takes {found:.4g} s a step, the bound is {bound:.4g} s"
            return f"the best plan found within {format_bytes(limit)} {took}", False
        return "", False


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
    Sizes are doubled and then bisected, so a larger one must need more.

    Args:
        build: called with a size, returns (model, sample), as the command line's function does; it may change the
            sample (batch, context) or the model (depth). Make both on the device "meta".
        device, mem_limit, optimizer, mem_slots: as for `rotoff.plan`; what is resident counts.
        step_time: seconds that a step may take, by the estimate.
        step: sizes are multiples of it. most: the largest that is asked for.

    Raises:
        OptionError: for sizes that are no whole numbers from 1, or a `build` that returns something else. Else as
            `rotoff.plan`.
    """
    for name, value in (("step", step), ("most", most)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{name} is {value!r}; give a whole number from 1")
    if most < step:
        raise OptionError(f"most is {most}, and sizes are multiples of {step}; give a larger one")
    asked = None if mem_limit is None else parse_bytes(mem_limit)
    question = _Question(build, find(device), asked, optimizer, step_time, mem_slots)
    low, high, tried = _bisected(lambda times: question.ask(times * step), most // step)
    size, refused = low * step, None if high is None else high * step
    planned = None
    if size:
        model, args, kwargs = read_built(build(size), size)
        named: dict[str, Any] = {"mem_limit": asked, "device": device, "optimizer": optimizer, "mem_slots": mem_slots}
        planned = plan(model, *args, **named, modes="joint", **kwargs)
    assert planned is None or isinstance(planned, PlannedModes)  # of one device
    why, proven = tried[high] if high is not None else ("", True)
    return Largest(size, refused, proven, why, planned, {n * step: not said for n, (said, _) in sorted(tried.items())})


def _bisected(ask: Callable[[int], tuple[str, bool]], last: int) -> tuple[int, int | None, dict[int, tuple[str, bool]]]:
    """The largest number up to `last` that works, the smallest known not to, and all answers. ask: as of
    `_Question`."""
    tried: dict[int, tuple[str, bool]] = {}

    def works(n: int) -> bool:
        tried[n] = ask(n)
        return not tried[n][0]

    low, high = 0, 1
    while works(high):
        if high == last:
            return last, None, tried
        low, high = high, min(2 * high, last)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low, high, tried


def cheapest(
    model: nn.Module,
    *sample: Any,
    devices: Iterable[Device | str],
    step_time: float | None = None,
    mem_limit: int | str | None = None,
    optimizer: str = "adam",
    **kwargs: Any,
) -> PlannedModes:
    """The first device of a list on which the model trains, with its plan; give the list from the cheapest on.

    Args:
        model, sample, mem_limit, optimizer, kwargs: as for `rotoff.plan`.
        devices: names or `Device`, in the order of your preference.
        step_time: seconds that a step may take, by the estimate.

    Raises:
        InfeasibleError: if it trains on none of them; the sentence has a reason for each. OptionError: for an unknown
            device.
    """
    targets = [find(device) for device in devices]
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
    raise InfeasibleError(f"none of {len(targets)} devices will do. " + ". ".join(reasons), min(least, default=0))


def read_built(made: Any, n: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and the arguments of what ``build(n)`` has `made`.

    Raises:
        OptionError: if that is not (model, sample).
    """
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise OptionError(f"build({n}) returned {type(made).__name__}; it must return (model, sample)")
    model, sample = made
    if isinstance(sample, Mapping):
        return model, (), dict(sample)
    return model, sample if isinstance(sample, tuple) else (sample,), {}
