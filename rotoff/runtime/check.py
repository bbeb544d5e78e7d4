"""What the device really holds against what the machine says, after every operation of a step: ``check=True``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..capture.stage import storage_key
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
        kept_bytes: of skip connections kept in place.
    """

    def __init__(self, chain: Chain, sequence: Sequence, block: int = 1, kept_bytes: int = 0) -> None:
        self._machine = Machine(chain)
        self._sequence = sequence
        self._block = block
        self._kept_bytes = kept_bytes
        self._index = -1

    def after(self, op: Op, held: Mapping[Value, Held], kept: Iterable[torch.Tensor] = ()) -> None:
        """Compare, once `op` has run, every value that the machine or the interpreter holds, and what is `kept` in place.

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
        staying = self._rounded({storage_key(t): t.untyped_storage() for t in kept}.values())
        if staying > self._kept_bytes:
            raise self._error(op, "skip connections kept in place", staying, self._kept_bytes)

    def begin(self, op: Op) -> None:
        """Follow an operation whose end is only seen with the next one: ``B``, which autograd runs."""
        self._index += 1
        self._machine.step(op)

    def _bytes(self, held: Held) -> int:
        return self._rounded(held.storages())

    def _rounded(self, storages: Iterable[torch.UntypedStorage]) -> int:
        return sum(-(-storage.nbytes() // self._block) * self._block for storage in storages)

    def _error(self, op: Op, v: Value | str, real: int, charged: int) -> ExecutionError:
        return ExecutionError(
            f"after {describe(op, self._index, self._sequence)}: the device holds {real} bytes ({format_bytes(real)}) of {v}"
            f" and the machine charges {charged} ({format_bytes(charged)}); call measure() again with this input, or report"
            " a bug if that does not help"
        )
