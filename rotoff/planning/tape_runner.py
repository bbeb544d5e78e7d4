"""Trains a model on tapes: the first step is recorded, later ones follow the plan that its log allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core.chain import Chain
from ..core.sequence import OpKind, Sequence
from ..profile.recorded_step import RecordedStep
from ..profile.tape_chain import TapeChain, chain_of
from ..profile.trace import trace_of
from ..runtime.execution_plan import ExecutionPlan, compile_sequence
from ..runtime.links.pool import LinkPool
from ..runtime.tape_step import TapeStep
from ..tape.tape import Known, Tape

logger = logging.getLogger("rotoff")
PATIENCE = 2  # steps off their course before another one is recorded


@dataclass
class Course:
    """What is planned for inputs of one signature. strayed: steps in a row that made other operations."""

    found: TapeChain
    plan: ExecutionPlan
    strayed: int = 0

    @property
    def expected_bytes(self) -> int:
        """The most bytes that a step by the plan holds."""
        return max(self.found.levels(self.plan.sequence))


class TapeRunner:
    """Runs the steps of `model`.

    Args:
        solve: returns the sequence for a chain, or None to keep everything.
        bandwidth: to the host and from it, B/s. stages: about as many.
    """

    def __init__(
        self,
        model: nn.Module,
        solve: Callable[[Chain], Sequence],
        bandwidth: tuple[float, float] = (1e9, 1e9),
        stages: int = 40,
        new_tape: Callable[[Known], Tape] = Tape,
    ) -> None:
        self.model, self._solve, self._bandwidth, self._stages = model, solve, bandwidth, stages
        self.new_tape = new_tape
        self.known = Known()
        self.courses: dict[Any, Course] = {}
        self.last: Tape | None = None
        self._recorded: tuple[Any, RecordedStep] | None = None
        self._links = LinkPool()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        self.plan_recorded()
        key = signature(self.model, args, kwargs)
        course = self.courses.get(key)
        if course is None or course.strayed >= PATIENCE:
            return self._record(key, args, kwargs)
        return self._follow(course, args, kwargs)

    def _record(self, key: Any, args: Any, kwargs: Any) -> Any:
        tape = RecordedStep(self.known, self.model)
        self._recorded, self.last = (key, tape), tape
        with tape, torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
            return self.model(*args, **kwargs)

    def plan_recorded(self) -> None:
        """Plan for the step that was recorded last, if its backward has run."""
        if self._recorded is None:
            return
        (key, step), self._recorded = self._recorded, None
        step.stop()
        if not step.complete or not step.operations:
            return
        found = chain_of(trace_of(step), self._bandwidth, self._stages)
        step.trust_stages(found.layout.begins)
        sequence = self._solve(found.chain)
        self.courses[key] = Course(found, compile_sequence(found.chain, sequence))

    def _follow(self, course: Course, args: Any, kwargs: Any) -> Any:
        link = None
        if any(op.kind is OpKind.OFFLOAD for op in course.plan.sequence):
            device = next(self.model.parameters()).device
            link = self._links.take(device, course.plan.host_bytes)
        tape = self.new_tape(self.known)
        self.last = tape
        done = (lambda: None) if link is None else (lambda: self._links.give_back(link))
        step = TapeStep(course.plan, course.found.layout, link, done)
        with step.forward(tape):
            result = self.model(*args, **kwargs)
        course.strayed = course.strayed + 1 if step.left_course else 0
        return result

    def train(self, mode: bool = True) -> None:
        """Set the model's mode."""
        self.model.train(mode)

    def eval(self) -> None:
        """Set the model's mode."""
        self.model.eval()

    def close(self) -> None:
        """Give back what belongs to no step."""
        if self._recorded is not None:
            self._recorded[1].stop()
            self._recorded = None
        self._links.close()


def signature(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What tells inputs apart that may need plans of their own."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    modes = tuple(module.training for module in model.modules())
    return tuple((t.shape, t.dtype, t.requires_grad) for t in tensors), hash(modes)
