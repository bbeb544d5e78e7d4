"""rotor's names on `Checkpointable`; `docs/migrating-from-rotor.md` has the table."""

from __future__ import annotations

from typing import Any

from ..core.simulator import simulate
from .terminal import render

NO_LIMIT = 2**62  # bytes; more than any device has


class RotorNames:
    """Baselines under rotor's names, and the plan as text."""

    def compute_pytorch_sequence(self: Any) -> Any:
        """Keep everything, as plain PyTorch does, without a limit; returns the module."""
        return self.compute_sequence(NO_LIMIT)

    def compute_seq_sequence(self: Any, segments: int | None = None) -> Any:
        """Plan `segments` equal segments as ``checkpoint_sequential`` does, without a limit; returns the module.

        segments: ⌈√L⌉ if None (Chen et al., 2016).
        """
        if segments is None:
            return self.compute_sequence(NO_LIMIT, policy="chen")
        return self.compute_sequence(NO_LIMIT, policy="periodic", segments=segments)

    def compute_homogeneous_sequence(self: Any, mem_limit: int | str, mem_slots: int | None = None) -> Any:
        """Plan as if all stages were equal (Griewank and Walther's Revolve); returns the module.

        mem_slots: outputs held at a time; the fastest count that fits if None.
        """
        return self.compute_sequence(mem_limit, policy="revolve", slots=mem_slots)

    def compute_min_sequence(self: Any) -> Any:
        """Keep nothing but the input and recompute everything from it, without a limit; returns the module."""
        return self.compute_sequence(NO_LIMIT, policy="revolve", slots=1)

    def check_sequence(self: Any) -> None:
        """Run the planned sequence on the machine once more.

        Raises:
            MeasureError: if there is no plan. InvalidSequenceError: if the machine refuses it.
        """
        simulate(self.chain, self.sequence, self.sequence.mem_limit)

    def display(self: Any) -> None:
        """Print the planned step on one screen: limit, peak and step time as in the log."""
        print(render(self.chain, self.sequence))
