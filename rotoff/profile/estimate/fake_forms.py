"""Forms of a stage with no device: the interpreter runs them on fake tensors, operations take what the data sheet says.

The same code finds and runs them as on a device (`form_meter`), so choices and bytes follow the same rules. What cannot
be had is the proof that a redo gives what the first run gave: fake tensors have no bits. The log is trusted; where the
model is measured, a form that fails there is left out, and a plan that needs it says so.
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
    """Forms of stages over fake tensors.

    Args:
        seconds: that passed in the bench's last log after the mark "backward".
    """

    recorded = 1  # the same each time

    def __init__(self, bench: MeasurementContext, seconds: Callable[[], float], policy: Policy | None) -> None:
        super().__init__(bench, policy)
        self._seconds = seconds

    def _redo_seconds(self, stage: WholeStage, recipes: Sequence[Recipe]) -> list[float | None]:
        whole = self._backward_seconds(stage.run)
        found: list[float | None] = []
        for recipe in recipes:
            try:
                found.append(max(0.0, self._backward_seconds(VariantRun(stage, recipe, self.bench)) - whole))
            except Exception:  # what fake tensors cannot do, a stage without forms does not need
                found.append(None)
        return found

    def _backward_seconds(self, one: Run | VariantRun) -> float:
        """Of the whole stage, or of one of its forms with the redo."""

        def step() -> Any:
            if isinstance(one, VariantRun):
                outputs, targets = one.forward()[0], one.targets()
            else:
                leaves = one.leaves()
                outputs, targets = flatten(one.forward(leaves))[0], one.targets(leaves)
            edges, gradients = get_edges(outputs), ones(outputs)
            self.bench.allocator.mark("backward")
            outputs.clear()
            return backward(edges, gradients, targets)

        self.bench.allocator.log(step)
        return self._seconds()
