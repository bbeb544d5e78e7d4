"""Finds the largest batch, the longest context or the deepest model that works."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.backward_from import BackwardFrom
from ..core.modes import whole_number
from ..errors import MeasureError, OptionError
from ..io.progress import Bar
from ..planning.options import Options
from ..planning.stages import StagesOption
from ..profile.estimate.devices import Device, find
from ..profile.estimate.estimate import Estimate
from .mesh import Mesh
from .planned_steps import PlannedSteps
from .question import HOST_BANDWIDTH, Question

GROWTH = 16  # next size / largest that works, at most, while none has been refused
MOST = 2**20


@dataclass(frozen=True)
class Largest:
    """The result of `largest`; prints as sentences.

    size: the largest size that works; 0 if none does.
    refused: the smallest size that cannot work by the estimated chain; None if all up to `most` work.
    binds: why `refused` does not work, as a sentence.
    planned: the plan of `size`; None if no size works.
    tried: every size that was tried, and whether it works.
    """

    size: int
    refused: int | None
    binds: str
    planned: PlannedSteps | None
    tried: dict[int, bool]

    def __str__(self) -> str:
        if self.refused is None:
            return f"{self.size} works, and nothing larger was asked for"
        return f"{self.size or 'nothing'} works; {self.refused} cannot work: {self.binds}"

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {**vars(self), "planned": self.planned and self.planned.to_dict()}


def largest(
    build: Callable[[int], Any],
    *,
    device: Device | str = "H200",
    mem_limit: int | str | None = None,
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
        step: sizes are multiples of it.
        most: the largest size to try. Give the longest context that the model takes: whether an embedding's table is
            long enough is not checked, since indices on "meta" have no values.

    Raises:
        OptionError: for sizes that are no whole numbers from 1, or another result of `build`. Others: `rotoff.plan`'s.
    """
    _check_sizes(build, step, most)
    how = optimizer, host_bandwidth, master_weights, Mesh.of(mesh, link)
    question = Question(find(device), Options(stages, backward_from, forms), "joint", mem_limit, *how)
    profiles = dict[int, tuple[nn.Module, Estimate]]()
    with Bar("searching") as bar:

        def ask(times: int) -> int:
            bar(0.0, f"size {(n := times * step)}")
            profiles[times] = model, profile = _estimated(question, build(n), n)
            return question.left_bytes(profile)

        tried = {n: left >= 0 for n, left in sorted(searched(ask, most // step).items())}
    low = max((n for n, enough in tried.items() if enough), default=0)
    refused = question.answer(*profiles[low + 1]).verdict if low + 1 in profiles else None
    return Largest(
        size=low * step,
        refused=None if refused is None else (low + 1) * step,
        binds=refused or "",
        planned=question.answer(*profiles[low]) if low else None,
        tried={n * step: enough for n, enough in tried.items()},
    )


def searched(left: Callable[[int], int], last: int) -> dict[int, int]:
    """What is `left` with some numbers, among them the largest one up to `last` that leaves nothing negative, and the
    next one. A larger number must leave less.

    What is left falls about as a line or a parabola, so the next number is where a line through the two answers nearest
    to 0 meets it; but every fourth time the middle of the open interval.
    """
    tried = dict[int, int]()
    low, high, guess = 0, last + 1, 1
    while True:
        tried[guess] = left(guess)
        low, high = (guess, high) if tried[guess] >= 0 else (low, guess)
        if low + 1 == high:
            return tried
        most = high - 1 if high in tried else min(GROWTH * low, last)
        if len(tried) % 4 == 0:
            guess = (low + most + 1) // 2
        elif len(tried) > 1:
            one, other, *_ = sorted(tried, key=lambda n: abs(tried[n]))
            slope = (tried[other] - tried[one]) / (other - one)
            guess = math.floor(one - tried[one] / slope) if slope < 0 else most
        guess = max(low + 1, min(guess, most))


def _estimated(question: Question, built: Any, n: int) -> tuple[nn.Module, Estimate]:
    """The model of size n, and its estimated profile."""
    model, args, kwargs = read_built(built, f"build({n})")
    try:
        return model, question.estimated(model, args, kwargs)
    except MeasureError as error:
        cure = "if the model takes no such size, give the largest that it takes as most="
        raise MeasureError(f"size {n}: {error}; {cure}") from error


def _check_sizes(build: Any, step: int, most: int) -> None:
    whole_number(step, "step")
    whole_number(most, "most")
    if not callable(build) or isinstance(build, nn.Module):
        raise OptionError(f"build is a {type(build).__name__}; give a function of a size that returns (model, sample)")
    if most < step:
        raise OptionError(f"most is {most}, and sizes are multiples of {step}; give a larger most")


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
