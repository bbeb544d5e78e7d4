"""A course of the forward, with what was measured of it and its plan; and by what inputs are told apart.

A course is an input signature (shapes, strides, dtypes, what needs gradients, autocast), the answers to what the
forward asks of its batch, and the model's own state.
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
from ..tensors.convolutions import flags
from ..tensors.tree import leaves
from .sizes import Sizes, split

_OTHERS = 64  # other courses that are remembered
_SEEN = 8  # of those, whose calls are noted
_TWICE = 2  # times that a step takes the same other course before that is measured, too


@dataclass(eq=False)
class Specialization:
    """One course of the forward.

    Attributes:
        profile: what was measured of it, or follows from other sizes.
        captured: its forward, as recorded.
        plan: None until there is a request for one.
        hint: what was beside the tensors of its input.
        measure_again: whether steps have become others than this one.
        left: whether the last step that was to take it did not.
        missed: how many steps did not take it, though they were to.
        patience: after how many of those all courses known are made one.
        loose: how many times what its steps may take the profile charges, where it follows from other sizes.
        seen: what steps did that chance has taken elsewhere, to be planned for as well.
    """

    profile: Profile
    captured: strategy.Captured
    plan: ExecutionPlan | None = None
    _planned: tuple[tuple[tuple[int, ...], bool], Profile] | None = None
    hint: str = ""
    measure_again: bool = False
    left: bool = False
    _expected: Course | None = None
    _astray: dict[int, int] = field(default_factory=dict)
    missed: int = 0
    patience: int = 4
    loose: float = 1.0
    seen: list[Tape] = field(default_factory=list)

    @property
    def planned(self) -> Profile:
        """The profile as the plan sees it: with the skip connections in place that it keeps there, and the gradients
        copied that it copies."""
        seen = (self.plan.kept, self.plan.compact) if self.plan is not None else ((), False)
        if self._planned is None or self._planned[0] != seen:
            self._planned = seen, self.profile.keeping(*seen)
        return self._planned[1]

    def become(self, profile: Profile) -> None:
        """The same course has another `profile`, and no plan by it yet."""
        self.profile, self.plan, self._planned, self._expected = profile, None, None, None

    @property
    def wants_more(self) -> bool:
        """Whether to note what steps do, since chance takes them elsewhere."""
        return self.captured.tape.random and self.missed > 0 and len(self.seen) < _SEEN

    def miss(self, astray: int) -> None:
        """A step did not take this course, as it was to; `astray` tells the one that it took."""
        self.left = True
        self.missed += 1
        self._astray[astray] = times = self._astray.get(astray, 0) + 1
        self.measure_again |= times == _TWICE
        if len(self._astray) > _OTHERS:  # by chance a model may take another one in each step
            del self._astray[next(iter(self._astray))]

    @property
    def expected(self) -> Course:
        """The calls that the model's forward is expected to make."""
        if self._expected is None:
            self._expected = expected(self.captured.tape, self.profile.stages, self.profile.prefix)
        return self._expected


_told_of_parameter = attrgetter("shape", "dtype", "requires_grad")


def signature(value: Any, model: nn.Module) -> Any:
    """What the bytes of a step depend on: the tensors of its input, autocast, and the model's parameters and modes."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    shapes = tuple(map(_shape, tensors))
    types = {"cpu", *(t.device.type for t in tensors)} - {"meta"}  # of which autocast knows nothing
    autocast = tuple((t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))) for t in sorted(types))
    todo, known = [model], {id(model)}  # in a loop of our own, since ``model.modules()`` has a generator for each level
    for module in todo:
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in known:
                    known.add(id(child))
                    todo.append(child)
    found = [p for module in todo if module._parameters for p in module._parameters.values() if p is not None]
    parameters = tuple(map(_told_of_parameter, found))
    modes = tuple([module.training for module in todo])
    return shapes, autocast, parameters, modes, torch.get_default_dtype()


def family_of(key: Any) -> tuple[Any, Sizes]:
    """Of a `signature`: all but the sizes, with what else times depend on; and the sizes."""
    shapes, *rest = key
    kinds, sizes = split(shapes)
    return (kinds, *rest, torch.get_num_threads(), torch.get_float32_matmul_precision(), flags()), sizes


def constants(value: Any) -> str:
    """What is beside the tensors of an input, which may or may not decide about the course of the forward."""
    return repr([leaf for leaf in leaves(value) if not isinstance(leaf, torch.Tensor)])


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    told = tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return told
    return *told, tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
