"""The costs of a stage in its chain: those measured for it alone, and those of the gradients it makes and receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..core.chain import Stage
from .measured import Measured
from .memory.backward_memory import Levels
from .memory.gradients import Charge
from .profile import PlacedBackward


@dataclass(frozen=True)
class ChargedStage:
    """A measured stage and the gradients at its ends.

    Attributes:
        made: the gradients that its backward makes (δ_{i-1}).
        own: the gradients that its backward receives (δ_i).
        copying: seconds that it takes to copy gradients of `made`.
    """

    measured: Measured
    made: Charge
    own: Charge
    copying: float

    @cached_property
    def costs(self) -> Stage:
        """The costs of the stage in the chain."""
        costs = self.measured.costs
        # the copies of a noncontiguous gradient were measured for the whole stage, whose peak may be elsewhere
        more = max(0, self.own.nbytes - self.measured.other_layout_bytes) if self.own.layout else 0
        sums = self._peak - self.measured.backward_peak
        forms = tuple(self._charged(form, form.backward_transient_bytes + sums, more) for form in costs.forms)
        return replace(self._charged(costs, max(0, self._peak)), grad_bytes=self.own.nbytes, forms=forms)

    def _charged(self, one: Any, peak: int, beside: int = 0) -> Any:
        """Return a stage or form with the bytes and seconds of its ``B`` in this chain. peak: of its backward. beside:
        further bytes that it holds."""
        transient = self._while_copying(peak) + self._beside + beside - self.made.nbytes
        time = one.backward_time + self.copying
        return replace(one, backward_time=time, backward_transient_bytes=max(0, transient))

    @property
    def _peak(self) -> int:
        """The peak of the backward once the outputs are freed."""
        return self._highest(self.measured.levels)

    def _highest(self, levels: Sequence[Levels]) -> int:
        return max(one.peak(self.measured.waiting, self.measured.adding) for one in levels)

    @property
    def freed_before_backward(self) -> int:
        """Bytes by which ``B`` stays below what the machine charges for it."""
        return max(0, self._machine_bytes - self._while_copying(self._peak) - self._beside)

    @property
    def placed(self) -> PlacedBackward:
        """What changes if the machine charges parameters' gradients from the ``B`` that makes them first."""
        spare, freed = [], []
        made = self.made.nbytes - self.made.waiting  # the rest is in the gradients that the machine charges
        for levels in self.measured.levels:
            first = levels.sizes.keys() - self.measured.adding
            charged = sum(levels.sizes[n] for n in first)
            peak = levels.peak(first, self.measured.adding)
            spare.append(charged + max(0, levels.peak((), self.measured.adding)) - max(0, peak))
            freed.append(charged - peak - self._beside)
        alone = max(levels.peak((), self.measured.adding) for levels in self.measured.levels)
        transient = max(0, self._while_copying(max(0, alone)) + self._beside - made)
        machine = max(made, made + transient - min(spare))
        less = min(spare) - transient + self.costs.backward_transient_bytes
        return PlacedBackward(less, max(0, machine + min(freed)), self.own.waiting)

    @property
    def output_retention(self) -> int:
        """Bytes that ``B`` needs beyond the machine's charge if the outputs are not freed."""
        peak = self._highest(self.measured.staying)
        return max(0, self._while_copying(peak) + self._beside - self._machine_bytes)

    @property
    def _machine_bytes(self) -> int:
        return self.made.nbytes + self.costs.backward_transient_bytes

    @property
    def _beside(self) -> int:
        """Bytes that ``B`` holds beyond those measured alone: shared storages of δ_i, and copies of noncontiguous
        gradients."""
        return self.own.shared + (self.measured.other_layout_bytes if self.own.layout else 0)

    def _while_copying(self, peak: int) -> int:
        """Return the larger of `peak` and the bytes held while gradients are copied at the end of a backward."""
        return max(peak, self.made.fresh_bytes + self.made.copied_bytes) if self.made.copied else peak


def charged_stages(
    measured: Sequence[Measured], charges: Sequence[Charge], copy_bandwidth: float = math.inf
) -> list[ChargedStage]:
    """Return the stages of a chain whose gradients keep `charges` alive. copy_bandwidth: within the device's memory,
    B/s."""
    return [
        ChargedStage(one, made, own, made.copied_bytes / copy_bandwidth)
        for one, (made, own) in zip(measured, pairwise(charges), strict=True)
    ]
