"""Estimates the forms of a stage: the interpreter runs them on fake tensors, and times come from the data sheet.

The same code finds and runs them as on a device (`variant_meter`), so choices and bytes follow the same rules. A redo
cannot be verified, because fake tensors have no contents; the log is trusted. When the model is measured, a form that
fails there is left out, and a plan that needs it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...tensors.recipe import Recipe
from ...tensors.tree import flatten
from ..selective.variant_meter import FormMeter
from ..selective.variant_run import VariantRun, WholeStage
from ..selective.variants import Policy
from ..timing.context import MeasurementContext
from ..timing.harness import Run, backward, get_edges, ones


class FakeFormMeter(FormMeter):
    """Finds forms of stages on fake tensors.

    Args:
        seconds: returns the seconds after the mark "backward" in the last log.
    """

    recorded = 1  # each recording gives the same times

    def __init__(self, context: MeasurementContext, seconds: Callable[[], float], policy: Policy | None) -> None:
        super().__init__(context, policy)
        self._seconds = seconds

    def _redo_seconds(self, stage: WholeStage, recipes: Sequence[Recipe]) -> list[float | None]:
        whole = self._backward_seconds(stage.run)
        found: list[float | None] = []
        for recipe in recipes:
            try:
                found.append(max(0.0, self._backward_seconds(VariantRun(stage, recipe, self.context)) - whole))
            except Exception:  # fake tensors do not support all operations; forms are optional
                found.append(None)
        return found

    def _backward_seconds(self, one: Run | VariantRun) -> float:
        """Return the seconds of the whole stage's backward, or of a form's with its redo."""

        def step() -> Any:
            if isinstance(one, VariantRun):
                outputs, targets = one.forward()[0], one.targets()
            else:
                leaves = one.leaves()
                outputs, targets = flatten(one.forward(leaves))[0], one.targets(leaves)
            edges, gradients = get_edges(outputs), ones(outputs)
            self.context.allocator.mark("backward")
            outputs.clear()
            return backward(edges, gradients, targets)

        self.context.allocator.log(step)
        return self._seconds()
