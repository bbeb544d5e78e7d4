"""What the device really holds against what the machine says, after every operation of a step: ``check=True``."""

from __future__ import annotations

from collections.abc import Mapping

from ..chain import Chain
from ..errors import ExecutionError
from ..sequence import Op, Sequence, Value, a
from ..simulator import Machine
from ..sizes import format_bytes
from .plan import describe
from .values import Held


class Checker:
    """Runs the machine beside one step.

    Args:
        chain: what was measured. sequence: what is run. block: bytes to which the device's allocator rounds, 1 for none.
    """

    def __init__(self, chain: Chain, sequence: Sequence, block: int = 1) -> None:
        self._machine = Machine(chain)
        self._sequence = sequence
        self._block = block
        self._index = -1

    def after(self, op: Op, held: Mapping[Value, Held]) -> None:
        """Compare, once `op` has run, every value that the machine or the interpreter holds.

        Raises:
            ExecutionError: where a value is on the device that the machine has not there, or takes more bytes than are
                charged, or is missing; naming the operation, its index, the value, and both numbers of bytes.
        """
        self.begin(op)
        charged = self._machine.device
        last = len(self._machine.chain)
        real = {v: self._bytes(value) for v, value in held.items() if value.on_device}
        for v in sorted({*charged, *real}):
            if v == a(0) or (v == a(last) and v not in real):
                continue  # the caller's
            if v not in real:
                raise self._error(op, v, 0, charged[v])
            if v not in charged or real[v] > charged[v]:
                raise self._error(op, v, real[v], charged.get(v, 0))

    def begin(self, op: Op) -> None:
        """Follow an operation whose end is only seen with the next one: ``B``, which autograd runs."""
        self._index += 1
        self._machine.step(op)

    def _bytes(self, held: Held) -> int:
        return sum(-(-storage.nbytes() // self._block) * self._block for storage in held.storages())

    def _error(self, op: Op, v: Value, real: int, charged: int) -> ExecutionError:
        return ExecutionError(
            f"after {describe(op, self._index, self._sequence)}: the device holds {real} bytes ({format_bytes(real)}) of {v}"
            f" and the machine charges {charged} ({format_bytes(charged)}); call measure() again with this input, or report"
            " a bug if that does not help"
        )
