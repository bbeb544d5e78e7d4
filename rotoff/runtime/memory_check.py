"""Compares what the device holds with what the machine predicts, after every operation of a step: ``check=True``.

Two things are compared: the storages of each value, and all storages that the step's operations have made and that
still exist, no matter what holds them. Temporaries within kernels are in neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.unused_results import SCALARS
from ..core.chain import Chain
from ..core.sequence import Op, Value, a
from ..core.sequence import Sequence as Operations
from ..core.simulator import Machine
from ..core.sizes import format_bytes
from ..errors import ExecutionError
from ..report.rotor_names import NO_LIMIT
from ..tensors.eager_mode import EagerMode
from ..tensors.storage import key_of, rounded, storage_key
from ..tensors.tree import tensor_leaves
from .execution_plan import describe
from .values import Held

logger = logging.getLogger("rotoff")


class MemoryChecker:
    """Runs the machine alongside one step.

    Args:
        chain: the measured chain. sequence: the operations of the step.
        block: bytes to whose multiples the device's allocator rounds, 1 for none.
        kept_bytes: of skip connections kept in place. levels: bytes predicted while each operation runs, comparable
            with `mem_limit`; empty if the step's operations cannot be seen (compiled or sharded modules).
    """

    def __init__(
        self,
        chain: Chain,
        sequence: Operations,
        block: int = 1,
        kept_bytes: int = 0,
        levels: Sequence[int] = (),
        mem_limit: int = NO_LIMIT,
    ) -> None:
        self._made = StorageCounter(block) if levels else None
        self._levels = levels
        self._mem_limit = mem_limit
        self._astray = False
        self._exceeded = False  # whether that has been said
        self._machine = Machine(chain)
        self._sequence = sequence
        self._block = block
        self._kept_bytes = kept_bytes
        self._index = -1

    def after(self, op: Op, held: Mapping[Value, Held], kept: Iterable[torch.Tensor] = ()) -> None:
        """Compare, after `op` has run, every value, what is `kept` in place, and the total.

        Raises:
            ExecutionError: if a value is on the device and not in the machine, takes more bytes than charged, or is
                missing, or if the total exceeds the prediction. It names the operation, its index, the value, and both
                numbers of bytes. A step that has left its course is correct all the same: it gets a warning if it
                exceeds the limit.
        """
        if self._astray:
            self._compare_with_limit(op)
            return
        self.begin(op)
        charged = self._machine.device
        last = len(self._machine.chain)
        real = {v: self._rounded(value.storages()) for v, value in held.items() if value.on_device}
        for v in sorted({*charged, *real}):
            if v == a(0) or (v == a(last) and v not in real):
                continue  # belongs to the caller
            if v not in real:
                raise self._error(op, v, 0, charged[v])
            if v not in charged or real[v] > charged[v]:
                raise self._error(op, v, real[v], charged.get(v, 0))
        staying = self._rounded({storage_key(t): t.untyped_storage() for t in kept}.values())
        if staying > self._kept_bytes:
            raise self._error(op, "skip connections kept in place", staying, self._kept_bytes)
        if self._made is not None and (alive := self._made.alive()) > self._levels[self._index]:
            predicted = self._levels[self._index]
            raise ExecutionError(
                f"after {describe(op, self._index, self._sequence)}: the device holds {alive} bytes"
                f" ({format_bytes(alive)}) that the step has made, and {predicted} ({format_bytes(predicted)}) are"
                " predicted; something (a hook, an attribute, a list) may hold a tensor that the plan drops, and did"
                " not when the model was measured: call measure() again, or report a bug if that does not help"
            )

    def leave_course(self) -> None:
        """From now on compare with the limit only, because the forward makes other calls than planned."""
        self._astray = True

    def _compare_with_limit(self, op: Op) -> None:
        if not self._exceeded and self._made is not None and (alive := self._made.alive()) > self._mem_limit:
            self._exceeded = True
            logger.warning(
                "rotoff: after %s, in a step that took another course than the planned one, the device holds %d bytes"
                " (%s) that the step has made, and the limit is %d (%s)",
                op,
                alive,
                format_bytes(alive),
                self._mem_limit,
                format_bytes(self._mem_limit),
            )

    def watching(self) -> AbstractContextManager[object]:
        """Within, the storages that operations make are counted; it may be nested."""
        return nullcontext() if self._made is None else self._made

    def begin(self, op: Op) -> None:
        """Let the machine run `op`. Called by itself for ``B``, which autograd runs and whose end nobody reports."""
        if not self._astray:
            self._index += 1
            self._machine.step(op)

    def _rounded(self, storages: Iterable[torch.UntypedStorage]) -> int:
        return sum(rounded(storage.nbytes(), self._block) for storage in storages)

    def _error(self, op: Op, v: Value | str, real: int, charged: int) -> ExecutionError:
        return ExecutionError(
            f"after {describe(op, self._index, self._sequence)}: the device holds {real} bytes ({format_bytes(real)})"
            f" of {v} and the machine charges {charged} ({format_bytes(charged)}); call measure() again with this"
            " input, or report a bug if that does not help"
        )


class StorageCounter(EagerMode):
    """Counts the storages that operations make while it is active and that still exist. Those of `SCALARS` bytes or
    less are not counted.

    Args:
        block: bytes to which the device's allocator rounds.
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def alive(self) -> int:
        """Return the bytes of those that still exist."""
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(rounded(nbytes, self._block) for _, nbytes in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(map(key_of, tensor_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        for tensor in tensor_leaves(result):
            if type(tensor) is torch.Tensor and (key := key_of(tensor)) is not None and key not in given:
                storage = tensor.untyped_storage()
                if storage.nbytes() > SCALARS:
                    self._storages.setdefault(key, (StorageWeakRef(storage), storage.nbytes()))
        return result
