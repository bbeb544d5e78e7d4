"""One course of a model's forward with its profile and plan, and the signature that distinguishes inputs.

A course depends on the input's signature (shapes, strides, dtypes, `requires_grad`, autocast), on branches that the
forward takes by the contents of its batch, and on the model's own state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..capture import strategy
from ..capture.course import Course, expected
from ..capture.tape import Tape
from ..profile.profile import Profile
from ..runtime.execution_plan import ExecutionPlan
from ..tensors.autocast import in_region
from ..tensors.kernel_flags import kernel_flags
from ..tensors.tree import leaves
from .sizes import Sizes, split

_OTHERS = 64  # other courses whose occurrences are counted
_SEEN = 8  # steps whose calls are recorded, if the forward is random
LOOKS = 8  # steps of a course that are recorded in vain to find larger ones
_TWICE = 2  # occurrences of the same other course before it is measured, too


@dataclass(eq=False)
class Specialization:
    """One course of the forward: what was measured, and the plan for it.

    Attributes:
        profile: measured on this course, or interpolated from other input sizes.
        captured: the recorded forward.
        plan: None until one is requested.
        hint: the input's leaves that are no tensors, as text (`constants`).
        measure_again: whether steps repeatedly took the same other course.
        no_more_courses: whether another course that steps took could not be measured, so that none is tried again.
        left: whether the last step that was expected to take this course took another.
        missed: how many steps were expected to take this course and took another.
        patience: how many misses, over all courses of a signature, until they are measured as one course.
        loose: estimated ratio of the bytes charged to the bytes needed, if the profile is interpolated.
        interpolated: whether the profile is; otherwise it was measured.
        stray: what a forward of the plain model allocates beyond the bytes charged, as the first one showed; later ones
            are compared with it.
        grown: the `constants` of a step that took more bytes than the limit allows; others with the same are recorded
            until a larger one is found and measured.
        looks: how many steps may still be recorded in vain.
        borrowed: whether its plan is that of another size, and a search may find a faster one.
        lost: seconds that steps by a borrowed plan took beyond computing everything once.
        seen: recorded forwards of steps that took random branches, to be covered by the next plan as well.
    """

    profile: Profile
    captured: strategy.Captured
    plan: ExecutionPlan | None = None
    _planned: tuple[tuple[tuple[int, ...], bool, bool], Profile] | None = None
    hint: str = ""
    measure_again: bool = False
    no_more_courses: bool = False
    left: bool = False
    _expected: Course | None = None
    _astray: dict[int, int] = field(default_factory=dict)
    missed: int = 0
    patience: int = 4
    loose: float = 1.0
    interpolated: bool = False
    stray: int | None = None
    grown: str | None = None
    looks: int = LOOKS
    borrowed: bool = False
    lost: float = 0.0
    seen: list[Tape] = field(default_factory=list)

    @property
    def planned(self) -> Profile:
        """The profile under the plan's choices: which skip connections stay in place, and if gradients are copied."""
        seen = self.plan.choices if self.plan is not None else ((), False, False)
        if self._planned is None or self._planned[0] != seen:
            self._planned = seen, self.profile.keeping(*seen)
        return self._planned[1]

    def become(self, profile: Profile) -> None:
        """Replace the profile, and discard the plan."""
        self.profile, self.plan, self._planned, self._expected = profile, None, None, None

    @property
    def wants_more(self) -> bool:
        """Whether to record the next step, since the forward is random and has left this course before."""
        more = self.missed > 0 and len(self.seen) < _SEEN and not self.no_more_courses
        return more and self.captured.tape.random

    def miss(self, astray: int) -> None:
        """Count a step that was expected to take this course; `astray` identifies the course that it took."""
        self.left = True
        self.missed += 1
        self._astray[astray] = times = self._astray.get(astray, 0) + 1
        self.measure_again |= times == _TWICE
        if len(self._astray) > _OTHERS:  # a random forward may take a new course in each step
            del self._astray[next(iter(self._astray))]

    @property
    def expected(self) -> Course:
        """The calls that the model's forward is expected to make."""
        if self._expected is None:
            self._expected = expected(self.captured.tape, self.profile.stages, self.profile.prefix)
        return self._expected

    def like(self, measured: Specialization) -> None:
        """Take over the expected calls of the `measured` course that this one was interpolated from."""
        self._expected = measured.expected


_told_of_parameter = attrgetter("shape", "dtype", "requires_grad")


def signature(value: Any, model: nn.Module) -> Any:
    """All that a step's bytes depend on: the input's tensors, autocast, the flags that choose kernels, the model's
    parameters and training modes."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    shapes = tuple(map(_shape, tensors))
    types = {"cpu", *(t.device.type for t in tensors)} - {"meta"}  # of which autocast knows nothing
    settings = ((t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))) for t in sorted(types))
    autocast = (in_region(), *settings, kernel_flags())
    todo, known = [model], {id(model)}  # faster than ``model.modules()``, which nests a generator for each level
    for module in todo:
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    todo.append(child)
    found = [p for module in todo if module._parameters for p in module._parameters.values() if p is not None]
    parameters = tuple(map(_told_of_parameter, found))
    modes = tuple([module.training for module in todo])
    return shapes, autocast, parameters, modes


def family_of(key: Any) -> tuple[Any, Sizes]:
    """Split a `signature` into what inputs of all sizes share, with all else that times depend on, and the sizes."""
    shapes, *rest = key
    kinds, sizes = split(shapes)
    return (kinds, *rest, torch.get_num_threads()), sizes


def constants(value: Any) -> str:
    """The input's leaves that are no tensors, as text; the course may depend on them."""
    return repr([leaf for leaf in leaves(value) if not isinstance(leaf, torch.Tensor)])


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    told = tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return told
    return *told, tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
