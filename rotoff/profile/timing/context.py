"""Where stages are run to be measured: a device, what sees its bytes, and what tells seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...capture.operations import OperationLog, record_operations
from ...tensors.tree import flatten
from ..memory.allocator import Allocator, DeviceAllocator
from .convergence import Repeats
from .harness import Run


@dataclass(frozen=True)
class MeasurementContext:
    """repeats: how often something is timed; the median counts. seconds: of an operation, its arguments and its result,
    in place of a clock."""

    device: torch.device
    allocator: Allocator
    repeats: Repeats
    seconds: Callable[[Any, Any, Any, Any], float] | None = None

    @classmethod
    def on(cls, device: torch.device, repeats: int | None) -> MeasurementContext:
        """A real one. repeats: as of `Repeats.read`."""
        return cls(device, DeviceAllocator(device), Repeats.read(repeats))

    def recorded(self, run: Run) -> OperationLog:
        """The operations of a forward."""
        leaves = run.leaves()
        return record_operations(lambda: flatten(run.forward(leaves))[0], self.device, self.seconds)
