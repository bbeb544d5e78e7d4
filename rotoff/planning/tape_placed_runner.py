"""Trains a model on tapes by plans that place its parameters, their gradients and the optimizer's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..core.chain import Chain, LinkRates
from ..core.sequence import OpKind, w
from ..core.sequence import Sequence as Plan
from ..core.simulator import simulate
from ..core.steady_step import at_rest
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.parameter_groups import groups_apart
from ..profile.tape_chain import TapeChain, chain_of
from ..profile.tape_groups import RecordedReads, TapeGroups, groups_of
from ..profile.trace import trace_of
from ..runtime.execution_plan import ExecutionPlan, compile_placed
from ..runtime.links.pool import LinkPool, new_link
from ..runtime.placed.placed_plan import PlacedPlan
from ..runtime.placed.placement import Placement
from ..runtime.tape_placed import Lending, PlacedStep, PlacedTape
from ..tape.tape import Known, Tape
from .tape_runner import PATIENCE, signature


@dataclass
class PlacedCourse:
    """What is planned for inputs of one signature. strayed: steps in a row that made other operations."""

    found: TapeChain
    groups: TapeGroups
    plan: ExecutionPlan
    strayed: int = 0

    @property
    def expected_bytes(self) -> int:
        """The most bytes that the device holds."""
        assert self.plan.placed is not None
        return self.plan.placed.peak_bytes


class PlacedRunner:
    """Runs the steps of `model`, whose parameters `optimizers` update.

    Args:
        solve: returns the sequence for a chain with parameters. during: whether it updates them within the backward.
        host: whether the host may update what lies there.
        bandwidth: to the host and from it, B/s. stages: about as many.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        solve: Callable[[Chain], Plan],
        during: bool = False,
        host: bool = False,
        bandwidth: tuple[float, float] = (1e9, 1e9),
        stages: int = 40,
    ) -> None:
        self.model, self._solve, self._during, self._host = model, solve, during, host
        self._bandwidth, self._stages = bandwidth, stages
        self.known = Known()
        self.courses: dict[Any, PlacedCourse] = {}
        self.last: Tape | None = None
        self._device = next(model.parameters()).device
        self._probe = OptimizerProbe(optimizers, self._device, {})
        self.placement = Placement(new_link(self._device), optimizers)
        self._recorded: tuple[Any, RecordedReads, int] | None = None
        self._links = LinkPool()
        self._staying: set[int] = set()  # by id, parameters that have to stay on the device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.placement.forward_begins()
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        self.plan_recorded()
        key = signature(self.model, args, kwargs)
        course = self.courses.get(key)
        if course is None or course.strayed >= PATIENCE:
            return self._record(key, args, kwargs)
        return self._follow(course, args, kwargs)

    def _record(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Run a step with everything on the host, where its operations read it."""
        groups, outside = groups_apart(self.model, self._probe)
        self.placement.begin(PlacedPlan(groups, frozenset(), frozenset(), frozenset(), outside=outside))
        tape = RecordedReads(self.known, self.model)
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        self._recorded, self.last = (key, tape, sum(t.nbytes for t in given)), tape
        with tape, torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
            return self.model(*args, **kwargs)

    def plan_recorded(self) -> None:
        """Plan for the step that was recorded last, if its backward has run."""
        if self._recorded is None:
            return
        (key, step, batch_bytes), self._recorded = self._recorded, None
        step.stop()
        if not step.complete or not step.operations:
            return
        found = chain_of(trace_of(step), LinkRates(*self._bandwidth, False), self._stages)
        step.trust_stages(found.layout.begins)
        groups = groups_of(step, found, self.model, self._probe, self._host, batch_bytes, self._staying)
        self.courses[key] = self.planned(found, groups, self._solve(groups.chain))

    def planned(self, found: TapeChain, groups: TapeGroups, sequence: Plan) -> PlacedCourse:
        """Return the course that follows `sequence`."""
        chain = groups.chain
        rest = at_rest(chain, sequence.ops, sequence.resident)
        resident, numbers = frozenset(rest.device), frozenset(range(1, len(chain.parameters) + 1))
        leaving = {op.stage for op in sequence if op.kind is OpKind.OFFLOAD and op.of == "g"}
        placed = PlacedPlan(
            groups=groups.placed,
            resident=resident,
            on_both=resident & frozenset(rest.host),
            moved=frozenset(k for k in numbers if w(k) not in resident or any(_moves(op, k) for op in sequence)),
            levels=tuple(groups.levels(found, sequence, self._during)),
            keep_gradients=numbers - leaving,
            outside=groups.outside,
            during=self._during,
        )
        trace = simulate(chain, sequence, updates="during" if self._during else "after")
        return PlacedCourse(found, groups, compile_placed(chain, sequence, trace, placed))

    def _follow(self, course: PlacedCourse, args: Any, kwargs: Any) -> Any:
        plan = course.plan
        assert plan.placed is not None
        link = None
        if plan.host_bytes:
            link = self._links.take(self._device, plan.host_bytes)
        self.placement.begin(plan.placed)
        lending = Lending(self.model, self.placement.places(plan.placed.moved), self._device)
        tape = PlacedTape(self.known, lending)
        self.last = tape
        done = (lambda: None) if link is None else (lambda: self._links.give_back(link))
        step = PlacedStep(plan, course.found.layout, link, self.placement, lending, done)
        self.placement.takes(step)
        with step.forward(tape):
            result = self.model(*args, **kwargs)
        course.strayed = course.strayed + 1 if step.left_course else 0
        if not lending.reached <= self._staying:
            self._staying |= lending.reached
            self.courses.clear()
        return result

    def close(self, resident: bool = True) -> None:
        """Return everything to the caller, on the device if `resident`, else where it lies."""
        if self._recorded is not None:
            self._recorded[1].stop()
            self._recorded = None
        self._links.close()
        self.placement.close(resident)


def _moves(op: Any, k: int) -> bool:
    return op.of == "w" and op.stage == k
