"""Runs one form of one stage under the interpreter itself, and measures its bytes.

The plan is ``F_sel 1 k``, ``B 1`` of a chain of this one stage, so times and bytes include all that the interpreter
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.autograd.graph import GradientEdge

from ...core.chain import Chain, Form, Stage
from ...core.sequence import Op, OpKind
from ...core.sequence import Sequence as Plan
from ...runtime.execution_plan import ExecutionPlan, compile_sequence
from ...runtime.step import Step
from ...tensors.recipe import Recipe
from ...tensors.stage import Behaviour
from ...tensors.tree import flatten
from ..memory.backward_memory import Gradients, Levels, log_backward
from ..timing.context import MeasurementContext
from ..timing.harness import Run, backward, handed_over, ones

WORTH = 0.05  # share of a stage's saved bytes that a form must free to be worth a choice


@dataclass(frozen=True)
class WholeStage:
    """A stage as measured with everything kept.

    Attributes:
        backward_peak: the most bytes of its backward above ā and δ_i once the outputs are freed; may be negative.
        carried_bytes: of its input, which its output passes on.
    """

    run: Run
    costs: Stage
    behaviour: Behaviour
    backward_peak: int
    carried_bytes: int

    @property
    def worth(self) -> float:
        """Bytes that a form must free to be worth a choice."""
        return WORTH * self.costs.saved_bytes


class VariantRun:
    """One form of a stage, run as often as needed."""

    def __init__(self, stage: WholeStage, recipe: Recipe, context: MeasurementContext) -> None:
        self._run = stage.run
        self.recipe = recipe
        self._behaviour = replace(stage.behaviour, forms=(recipe,))
        self._carried_bytes = stage.carried_bytes
        self._context = context
        self._plan, self._again = _plan_of_one(), _plan_of_one(Op(OpKind.F_CK, 1))
        self._leaves: list[torch.Tensor] = []

    def forward(self, again: bool = False) -> tuple[list[torch.Tensor], Step]:
        """Run ``F_sel``; return the outputs, and the step that waits for their gradients. again: run ``F_ck``, so that
        the step runs ``F_sel`` in its backward."""
        self._leaves = self._run.leaves()
        plan = self._again if again else self._plan
        step = Step(plan, [self._run.stage], [self._behaviour], self._context.device, None, lambda _: None)
        return flatten(step.forward(self._run.rebuild(self._leaves)))[0], step

    def targets(self, edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
        """Return the tensors whose gradients the backward of the last forward computes; parameters come last."""
        return self._run.targets(self._leaves, edges)

    def costs(self, backward_time: float) -> Form:
        """Return the form, whose ``B`` takes `backward_time`. The bytes of its backward, with the redo, are those above
        ā and δ_i, as in `BackwardBytes.peak`."""
        allocator, kept = self._context.allocator, dict[int, int]()  # allocated bytes by address

        def step() -> Gradients:
            outputs, made = self.forward()
            every = ((allocator.address(t), t.untyped_storage().nbytes()) for t in (*outputs, *made.stored(1)))
            kept.update((address, allocator.rounded(nbytes)) for address, nbytes in every)
            allocator.mark("forward")
            start = handed_over(outputs, ones(outputs))
            allocator.mark("backward")
            del outputs
            return backward(*start, self.targets(start[0]))

        _, log, ends = log_backward(allocator, self._run.parameters, step)
        forward = log.before("forward")
        live = forward.live()
        saved = sum(kept[ptr] for ptr in live if ptr in kept)
        transient = max(0, forward.peak() - sum(live.values()) - self._carried_bytes)
        peak = Levels.of(log.after("backward"), ends).peak()
        return Form(saved + self._carried_bytes, backward_time, transient, peak)


def _plan_of_one(*before: Op) -> ExecutionPlan:
    chain = Chain((Stage(forms=(Form(0, 0.0),)),), 1.0, 1.0)
    return compile_sequence(chain, Plan((*before, Op(OpKind.F_SEL, 1, 1), Op(OpKind.B, 1))))
