"""Trains a model on tapes: the first step is recorded, later ones follow the plan that its log allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..core.chain import LinkRates
from ..profile.recorded_step import RecordedStep
from ..profile.tape_chain import TapeChain, chain_of
from ..profile.trace import trace_of
from ..runtime.execution_plan import ExecutionPlan, compile_sequence
from ..runtime.links.pool import LinkPool
from ..runtime.tape_step import TapeStep
from ..tape.tape import Known, Tape
from .tape_planner import plan

logger = logging.getLogger("rotoff")
PATIENCE = 2  # steps off their course before another one is recorded


@dataclass
class Course:
    """What is planned for inputs of one signature. plan: None if the model runs as it is. strayed: steps in a row that
    made other operations."""

    found: TapeChain
    plan: ExecutionPlan | None
    strayed: int = 0

    @property
    def expected_bytes(self) -> int:
        """The most bytes that a step by the plan holds."""
        return self.found.trace.plain_bytes() if self.plan is None else max(self.found.levels(self.plan.sequence))


class TapeRunner:
    """Runs the steps of `model`.

    Args:
        limit: bytes of a step; or a function of the chains of a step, which returns it.
        mode, options: as for `rotoff.solve`.
        bandwidth: to the host and from it, B/s. stages: about as many.
    """

    def __init__(
        self,
        model: nn.Module,
        limit: int | Callable[[list[TapeChain]], int],
        mode: str = "joint",
        bandwidth: tuple[float, float] = (1e9, 1e9),
        stages: int = 40,
        new_tape: Callable[[Known], Tape] = Tape,
        **options: Any,
    ) -> None:
        self.model, self._limit, self._bandwidth, self._stages = model, limit, bandwidth, stages
        self._mode, self._options = mode, options
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
        if course.plan is None:
            return self.model(*args, **kwargs)
        return self._follow(course, course.plan, args, kwargs)

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
        trace = trace_of(step)
        chains = [chain_of(trace, LinkRates(*self._bandwidth, False), self._stages)]
        if chains[0].stay:
            chains.append(chain_of(trace, LinkRates(*self._bandwidth, False), self._stages, far=math.inf))
        limit = self._limit(chains) if callable(self._limit) else self._limit
        if trace.plain_bytes() <= limit:
            self.courses[key] = Course(chains[0], None)
        else:
            found, sequence = plan(chains, limit, self._mode, **self._options)
            self.courses[key] = Course(found, compile_sequence(found.chain, sequence))
        step.trust_stages(self.courses[key].found.layout.begins)

    def _follow(self, course: Course, plan: ExecutionPlan, args: Any, kwargs: Any) -> Any:
        device = next(self.model.parameters()).device
        take = partial(self._links.take, device, plan.host_bytes) if plan.host_bytes else None
        tape = self.new_tape(self.known)
        self.last = tape
        step = TapeStep(plan, course.found.layout, take, self._links.give_back)
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
