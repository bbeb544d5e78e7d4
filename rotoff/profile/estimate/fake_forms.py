"""Estimates the forms of a stage: the interpreter runs them on fake tensors, and times come from the data sheet.

The same code finds and runs them as on a device (`variant_meter`), so choices and bytes follow the same rules. A redo
cannot be verified, because fake tensors have no contents; the log is trusted. When the model is measured, a form that
fails there is left out, and a plan that needs it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...core.chain import Form
from ...tensors.recipe import Recipe
from ..selective.variant_meter import FormMeter
from ..selective.variant_run import VariantRun, WholeStage
from ..selective.variants import Choice, FormPolicy
from ..timing.context import MeasurementContext


class FakeFormMeter(FormMeter):
    """Finds forms of stages on fake tensors.

    Args:
        seconds: returns the seconds after the mark "backward" in the last log.
    """

    recorded = 1  # each recording gives the same times

    def __init__(self, context: MeasurementContext, seconds: Callable[[], float], policy: FormPolicy | None) -> None:
        super().__init__(context, policy)
        self._seconds = seconds

    def _measured(
        self, stage: WholeStage, choices: Sequence[Choice], times: dict[Any, float | None]
    ) -> tuple[list[tuple[Form, Recipe]], str]:
        pairs = []
        for choice in choices:
            try:
                form = VariantRun(stage, choice.recipe, self.context).costs(0.0)
            except Exception:  # fake tensors do not support all operations; forms are optional
                continue
            seconds = max(stage.costs.backward_time, self._seconds())
            pairs.append((replace(form, backward_time=seconds), choice.recipe))
        return pairs, ""
