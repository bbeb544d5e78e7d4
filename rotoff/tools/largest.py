"""Finds the largest batch, the longest context, the deepest model or the cheapest device that works."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from torch import nn

from ..core.backward_from import BackwardFrom
from ..core.modes import as_tuple, whole_number
from ..errors import InfeasibleError, MeasureError, OptionError
from ..io.progress import Bar
from ..planning.options import Options
from ..planning.stages import StagesOption
from ..profile.estimate.devices import Device, find
from .mesh import Mesh, check_positive
from .plan import plan
from .planned_steps import PlannedSteps
from .question import HOST_BANDWIDTH, Question
from .size_search import MOST, searched, works


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
    planned: PlannedSteps | None
    tried: dict[int, bool]

    def __str__(self) -> str:
        if self.refused is None:
            return f"{self.size} works, and nothing larger was asked for"
        why = "cannot work" if self.proven else "was not found to work"
        return f"{self.size or 'nothing'} works; {self.refused} {why}: {self.binds}"

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {**vars(self), "planned": self.planned and self.planned.to_dict()}


class _Answer(NamedTuple):
    """About a size. margins: bytes and, if a step time was given, seconds that are left. planned: makes the plan."""

    margins: dict[str, float]
    planned: Callable[[], PlannedSteps]

    def refusal(self, step_time: float | None) -> tuple[str, bool]:
        """Why the size does not work, and whether no plan can make it work."""
        found = self.planned()
        if step_time is None or found.best is None or found.bound_time is None:
            return found.verdict, True
        best, bound = found.best.step_time, found.bound_time
        why = f"the best plan found takes {best:.4g} s a step, and no plan takes less than {bound:.4g} s"
        return why, bound > step_time


def _answer(question: Question, built: Any, n: int, step_time: float | None) -> _Answer:
    """Whether size n works, of which `built` is the model and its sample."""
    model, args, kwargs = read_built(built, f"build({n})")
    try:
        profile = question.estimated(model, args, kwargs)
    except MeasureError as error:
        cure = "if the model takes no such size, give the largest that it takes as most="
        raise MeasureError(f"size {n}: {error}; {cure}") from error
    planned = cache(partial(question.answer, model, profile))
    least, room = question.least_bytes(profile)
    margins: dict[str, float] = {"bytes": room - least}
    if least <= room and step_time is not None:
        found = planned().best
        assert found is not None
        margins["seconds"] = step_time - found.step_time
    return _Answer(margins, planned)


def largest(
    build: Callable[[int], Any],
    *,
    device: Device | str = "H200",
    mem_limit: int | str | None = None,
    step_time: float | None = None,
    optimizer: str = "adam",
    step: int = 1,
    most: int = MOST,
    host_bandwidth: float = HOST_BANDWIDTH,
    master_weights: bool = False,
    stages: StagesOption = None,
    backward_from: BackwardFrom = None,
    forms: bool = True,
    mesh: str | None = None,
    link: float | None = None,
) -> Largest:
    """Find the largest batch, context or depth that trains on a device, without the device and without memory.

    ``rotoff.largest(lambda n: (model, torch.empty(n, 1024, device="meta")), device="RTX 4090")`` is the largest batch.
    A larger size must need more. What works is what `rotoff.plan` has a plan for: parameters, gradients and optimizer
    states may lie on the host, unless a `mem_limit` is given.

    Args:
        build: called with a size, returns (model, sample), as the command line's function does; the size may be that of
            the sample (batch, context) or of the model (depth). Make both on the device "meta".
        device, mem_limit, optimizer, host_bandwidth, master_weights, stages, backward_from, forms, mesh,
            link: as for `rotoff.plan`.
        step_time: most estimated seconds of a step, with the updates. step: sizes are multiples of it.
        most: the largest size to try. Give the longest context that the model takes: whether an embedding's table is
            long enough is not checked, since indices on "meta" have no values.

    Raises:
        OptionError: for sizes that are no whole numbers from 1, or another result of `build`. Others: `rotoff.plan`'s.
    """
    _check_sizes(build, step, most)
    how = optimizer, host_bandwidth, master_weights, Mesh.of(mesh, link)
    question = Question(find(device), Options(stages, backward_from, forms), "joint", mem_limit, *how)
    _check_step_time(step_time)
    answers = dict[int, _Answer]()
    with Bar("searching") as bar:

        def ask(times: int) -> dict[str, float]:
            bar(0.0, f"size {(n := times * step)}")
            answers[times] = _answer(question, build(n), n, step_time)
            return answers[times].margins

        tried = {n: works(margins) for n, margins in sorted(searched(ask, most // step).items())}
    low = max((n for n, enough in tried.items() if enough), default=0)
    refused = low + 1 if low + 1 in answers else None
    binds, proven = ("", True) if refused is None else answers[refused].refusal(step_time)
    return Largest(
        size=low * step,
        refused=refused and refused * step,
        proven=proven,
        binds=binds,
        planned=answers[low].planned() if low else None,
        tried={n * step: enough for n, enough in tried.items()},
    )


def _check_sizes(build: Any, step: int, most: int) -> None:
    whole_number(step, "step")
    whole_number(most, "most")
    if not callable(build) or isinstance(build, nn.Module):
        raise OptionError(f"build is a {type(build).__name__}; give a function of a size that returns (model, sample)")
    try:
        inspect.signature(build).bind(1)
    except TypeError as error:
        raise OptionError(
            f"build cannot be called with a size ({error}); give a function such as build(n) that returns"
            " (model, sample)"
        ) from None
    if most < step:
        raise OptionError(f"most is {most}, and sizes are multiples of {step}; give a larger most")


def _check_step_time(step_time: float | None) -> None:
    if step_time is not None:
        check_positive("step_time", step_time, "give seconds above 0, or None for any")


def first_device(
    model: nn.Module,
    *sample: Any,
    devices: Iterable[Device | str],
    step_time: float | None = None,
    **options: Any,
) -> PlannedSteps:
    """The first device of a list on which the model trains, with its plan. List them in the order of your preference,
    such as by price.

    Args:
        model, sample, options: as for `rotoff.plan`; the mode is "joint".
        devices: names or `Device`.
        step_time: most estimated seconds of a step, with the updates.

    Raises:
        InfeasibleError: if it trains on none of them; the message has a reason for each. OptionError: for an unknown
            device.
    """
    _check_step_time(step_time)
    if refused := sorted({"modes", "pipeline", "device"} & {*options}):
        raise OptionError(f"{refused[0]} is no argument of first_device, which plans in mode joint; use rotoff.plan")
    targets = [find(device) for device in as_tuple(devices)]
    if not targets:
        raise OptionError("devices is empty; give at least one, such as rotoff.devices()")
    reasons, least = [], []
    for target in targets:
        found = plan(model, *sample, device=target, modes="joint", **options)
        assert isinstance(found, PlannedSteps)  # of one device
        least.append(found.min_mem_limits["joint"])
        if found.best is None:
            reasons.append(f"{target.name}: {found.verdict}")
        elif step_time is not None and (time := found.best.step_time) > step_time:
            reasons.append(
                f"{target.name}: a step takes {time:.4g} s, and no plan takes less than {found.bound_time:.4g} s"
            )
        else:
            return found
    raise InfeasibleError(f"none of the devices works. {'. '.join(reasons)}", min(least, default=0))


def read_built(made: Any, asked: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments from `made`, the result of what was `asked`.

    Raises:
        OptionError: if that is not (model, sample).
    """
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise OptionError(f"{asked} returned {type(made).__name__}; it must return (model, sample)")
    model, sample = made
    if isinstance(sample, Mapping):
        return model, (), dict(sample)
    return model, sample if isinstance(sample, tuple) else (sample,), {}
