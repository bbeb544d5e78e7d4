"""``check=True``: after every operation of a planned step, compares the bytes that it holds with those of its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..core.sequence import Sequence as Plan
from ..errors import ExecutionError
from .execution_plan import describe


class HeldCheck:
    """Compares what a step holds between two operations with what its values are to hold.

    Args:
        sequence: of the step. planned: the bytes of all values on the device after each operation; None where the
            backward is under way, and autograd frees them one by one.
    """

    def __init__(self, sequence: Plan, planned: Sequence[int | None]) -> None:
        self._sequence, self._planned = sequence, planned

    def after(self, index: int, storages: Iterable[torch.UntypedStorage]) -> None:
        """Operation `index` has run, and the step holds `storages`.

        Raises:
            ExecutionError: if these are more bytes than planned.
        """
        held = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        planned = self._planned[index]
        if planned is not None and held > planned:
            raise ExecutionError(
                f"after {describe(self._sequence[index], index, self._sequence)} the step holds {held} bytes of values,"
                f" and the plan charges {planned}"
            )
