"""The table of `rotoff.plan`: plain PyTorch, what others set, and rotoff's plans, as steps of one machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..core.sequence import Sequence
from ..core.simulator import simulate
from ..solver.placement import RESIDENT, place
from ..solver.settings import (
    ACTIVATIONS,
    CHECKPOINT,
    KEEP,
    ON_HOST,
    SWAPPED,
    UPDATED_ON_HOST,
    Setting,
    sequence_of,
)
from .planned_modes import PlannedStep, moved_by
from .whole_device import WholeDevice

_FASTEST_FIRST = (KEEP, CHECKPOINT)  # of those that are combined with moving parameters


@dataclass(frozen=True)
class Steps:
    """Makes rows.

    whole: what training takes. limit: bytes for it. update_time: seconds of the updates that the chain of `whole` does
    not have.
    """

    whole: WholeDevice
    limit: int
    update_time: float = 0.0

    def row(self, name: str, sequence: Sequence, plain: bool = False, setting: str = "") -> PlannedStep:
        """The row of a step. plain: whether it is the plain model's."""
        trace, levels = simulate(self.whole.chain, sequence), self.whole.levels(sequence, plain=plain)
        unit, time, peak = self.whole.chain.compute_time, trace.makespan + self.update_time, max(levels)
        most, growth = None, self.whole.growth
        if growth is not None:
            before, later = (self.whole.at(n).levels(sequence, plain=plain) for n in (growth.batch, growth.count))
            grows = [(b - a) / (growth.count - growth.batch) for a, b in zip(before, later, strict=True)]
            if all(level <= self.limit for level, more in zip(before, grows, strict=True) if more <= 0):
                rooms = [(self.limit - level) / more for level, more in zip(before, grows, strict=True) if more > 0]
                most = max(0, math.floor(min(rooms, default=0.0) + growth.batch + 1e-9)) or None
        return PlannedStep(
            name,
            peak <= self.limit,
            peak,
            trace.host_peak_bytes,
            time,
            time / unit - 1 if unit else 0.0,
            most,
            moved_by(sequence, trace),
            setting,
        )

    def of(self, setting: Setting) -> PlannedStep:
        """The row of a setting."""
        plain = setting == Setting()
        return self.row(str(setting), sequence_of(self.whole.chain, setting), plain)

    def elsewhere(self) -> list[PlannedStep]:
        """Plain PyTorch, and what is set elsewhere. Where that moves parameters, with the fastest of keeping all
        activations and checkpointing that fits, or the smallest."""
        found = [self.of(Setting(how)) for how in ACTIVATIONS]
        if not any(group.grad_bytes for group in self.whole.chain.parameters):
            return found
        found.append(self._best(Setting(how, parameters=UPDATED_ON_HOST) for how in _FASTEST_FIRST))
        found.append(self._best(self._swapped(how) for how in _FASTEST_FIRST))
        found.append(self._best(Setting(how, parameters=ON_HOST) for how in _FASTEST_FIRST))
        return found

    def _best(self, settings: Iterable[Setting]) -> PlannedStep:
        rows = [self.of(setting) for setting in settings]
        best = min(rows, key=lambda row: (not row.fits, row.step_time if row.fits else row.peak_bytes))
        batches = [row.largest_batch for row in rows if row.largest_batch is not None]
        return replace(best, largest_batch=max(batches, default=None))

    def _swapped(self, how: str) -> Setting:
        """The fewest groups that must be swapped, or all."""
        chain = self.whole.chain
        low, high = 0, len(chain.parameters)
        while low < high:
            middle = (low + high) // 2
            setting = Setting(how, parameters=SWAPPED, swapped=middle)
            if max(self.whole.levels(sequence_of(chain, setting))) <= self.limit:
                high = middle
            else:
                low = middle + 1
        return Setting(how, parameters=SWAPPED, swapped=max(1, high))

    def with_parameters_resident(self, sequence: Sequence) -> Sequence:
        """A plan of the activations, with the updates after it."""
        chain = self.whole.chain
        return place(chain, sequence.ops, [RESIDENT] * len(chain.parameters), "after") if chain.parameters else sequence
