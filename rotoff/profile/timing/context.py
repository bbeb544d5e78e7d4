"""The context in which stages are measured: a device, an allocator and a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...capture.operations import OperationLog, record_operations
from ...runtime.placed.lending import Lender
from ...tensors.tree import flatten
from ..memory.allocator import Allocator, DeviceAllocator
from .convergence import Repeats
from .harness import Run


@dataclass(frozen=True)
class MeasurementContext:
    """Where and how stages are measured.

    Attributes:
        repeats: how often something is timed; the median counts.
        seconds: returns the seconds of an operation, given its arguments and its result, instead of a clock.
        lender: of parameters that lie on the host.
    """

    device: torch.device
    allocator: Allocator
    repeats: Repeats
    seconds: Callable[[Any, Any, Any, Any], float] | None = None
    lender: Lender | None = None

    @classmethod
    def on(cls, device: torch.device, repeats: int | None, lender: Lender | None = None) -> MeasurementContext:
        """Return the context of a real device. repeats: as in `Repeats.read`."""
        return cls(device, DeviceAllocator(device), Repeats.read(repeats), lender=lender)

    def recorded(self, run: Run) -> OperationLog:
        """Return the operations of a forward."""
        leaves = run.leaves()
        return record_operations(lambda: flatten(run.forward(leaves))[0], self.device, self.seconds)
