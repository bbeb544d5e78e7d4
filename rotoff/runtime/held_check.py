"""``check=True``: after every operation of a planned step, compares the bytes that it holds with those of its plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from ..core.sequence import Sequence as Plan
from ..errors import ExecutionError

logger = logging.getLogger("rotoff")


class HeldCheck:
    """Compares what a step holds between two operations with what its values are to hold.

    Args:
        sequence: of the step. planned: the bytes of all values on the device after each operation; None where the
            backward is under way, and autograd frees them one by one.
        limit: of the step.
    """

    def __init__(self, sequence: Plan, planned: Sequence[int | None], limit: int) -> None:
        self._sequence, self._planned, self._limit = sequence, planned, limit
        self._told = False

    def after(self, index: int, storages: Iterable[torch.UntypedStorage]) -> None:
        """Operation `index` has run, and the step holds `storages`.

        Raises:
            ExecutionError: if these are more bytes than planned.
        """
        held = _bytes_of(storages)
        planned = self._planned[index]
        if planned is not None and held > planned:
            ops = [f">{op}<" if n == index else str(op) for n, op in enumerate(self._sequence)]
            near = " | ".join(ops[max(index - 3, 0) : index + 4])
            raise ExecutionError(
                f"after op {index} ({self._sequence[index]}) of {len(ops)}: {near} the step holds {held} bytes of"
                f" values, and the plan charges {planned}"
            )

    def off_course(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Warn, once in a step, if what it has saved since it was looked at last exceeds the limit by itself."""
        held = _bytes_of(storages)
        if held > self._limit and not self._told:
            self._told = True
            logger.warning(
                "rotoff: off its course the device holds %d bytes at least, and the limit is %d bytes; the next step"
                " that makes these operations is planned",
                held,
                self._limit,
            )


def _bytes_of(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
