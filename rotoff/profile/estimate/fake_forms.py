"""Forms of a stage with no device: the interpreter runs them on fake tensors, operations take what the data sheet says.

The same code finds and runs them as on a device (`form_meter`), so choices and bytes follow the same rules. What cannot
be had is the proof that a redo gives what the first run gave: fake tensors have no bits. The log is trusted; where the
model is measured, a form that fails there is left out, and a plan that needs it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...core.chain import Form
from ...tensors.recipe import Recipe
from ..selective.variant_meter import FormMeter
from ..selective.variant_run import VariantRun, WholeStage
from ..selective.variants import Choice, Policy
from ..timing.context import MeasurementContext


class FakeFormMeter(FormMeter):
    """Forms of stages over fake tensors.

    Args:
        seconds: that passed in the bench's last log after the mark "backward".
    """

    recorded = 1  # the same each time

    def __init__(self, bench: MeasurementContext, seconds: Callable[[], float], policy: Policy | None) -> None:
        super().__init__(bench, policy)
        self._seconds = seconds

    def _measured(
        self, stage: WholeStage, choices: Sequence[Choice], times: dict[Any, float]
    ) -> tuple[list[tuple[Form, Recipe]], str]:
        pairs = []
        for choice in choices:
            try:
                form = VariantRun(stage, choice.recipe, self.bench).costs(0.0)
            except Exception:  # what fake tensors cannot do, a stage without forms does not need
                continue
            seconds = max(stage.costs.backward_time, self._seconds())
            pairs.append((replace(form, backward_time=seconds), choice.recipe))
        return pairs, ""
