"""Forms of a stage with no device: the interpreter runs them on fake tensors, operations take what the data sheet says.

The same code finds and runs them as on a device (`form_meter`), so choices and bytes follow the same rules. What cannot be had
is the proof that a redo gives what the first run gave: fake tensors have no bits. The log is trusted; where the model is
measured, a form that fails there is left out, and a plan that needs it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..capture.operations import OperationLog, record_operations
from ..capture.stage import Behaviour, flatten
from ..runtime.selective import Recipe
from .allocations import AllocationLog
from .form_meter import FormMeter, Trial
from .forms import Policy
from .meter import Meter
from .roofline import Roofline
from .steady import Repeats
from .trial import Run, backward, get_edges, ones

T = TypeVar("T")


class FakeFormMeter(FormMeter):
    """Forms of stages over fake tensors.

    Args:
        meter: the whole stages'; it sees what is allocated. mode: that the tensors live in. seconds: that passed in its last record after the mark "backward".
    """

    recorded = 1  # the same each time

    def __init__(
        self, meter: Meter, mode: FakeTensorMode, roofline: Roofline, seconds: Callable[[], float], policy: Policy | None
    ) -> None:
        super().__init__(meter.device, Repeats(1, 1), policy)
        self._meter = meter
        self._mode = mode
        self._roofline = roofline
        self._seconds = seconds

    def record(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        with self._mode:  # in a backward too, where what the interpreter makes is fake as well
            return self._meter.record(run)

    def mark(self, name: str) -> None:
        self._meter.mark(name)

    def _address(self, tensor: torch.Tensor) -> int:
        return self._meter.address(tensor)

    def _recorded(self, run: Run) -> OperationLog:
        leaves = run.leaves()
        return record_operations(lambda: flatten(run.forward(leaves))[0], self.device, self._roofline.time)

    def _proven(self, run: Run, recipe: Recipe, behaviour: Behaviour) -> bool:
        try:
            self._backward_seconds(Trial(run, recipe, behaviour, self.device))
        except Exception:  # what fake tensors cannot do, a stage without forms does not need
            return False
        return True

    def _redo_seconds(self, run: Run, trials: Sequence[Trial]) -> list[float]:
        whole = self._backward_seconds(run)
        return [max(0.0, self._backward_seconds(trial) - whole) for trial in trials]

    def _backward_seconds(self, one: Run | Trial) -> float:
        """Of the whole stage, or of one of its forms with the redo."""

        def step() -> Any:
            if isinstance(one, Trial):
                outputs, targets = one.forward()[0], one.targets()
            else:
                leaves = one.leaves()
                outputs, targets = flatten(one.forward(leaves))[0], one.targets(leaves)
            edges, gradients = get_edges(outputs), ones(outputs)
            self.mark("backward")
            outputs.clear()
            return backward(edges, gradients, targets)

        self.record(step)
        return self._seconds()
