"""Bytes that the machine charges more than once: those of a skip connection that values carry.

Each value that carries it is charged, since each may go to the host alone. But for as long as it is only handed on, all
have it in one storage; one that comes back from the host has it in a storage of its own, and a run of the stage that
makes it makes another. What operations need beside values was measured with a stage's input and output sharing, so
nothing is taken off between those two, nor for what a ``B`` lets go of piece by piece.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count

from ..core.chain import Chain
from ..core.sequence import FORWARDS, Op, OpKind, Value
from ..core.simulator import Machine
from ..profile.memory.skips import Skip

Storages = Mapping[Skip, int]  # in which of a skip's storages a value has it


def shared_bytes(chain: Chain, skips: Collection[Skip], operations: Collection[Op]) -> list[int]:
    """For each operation, bytes that are charged to several values on the device and lie there once, at least.

    skips: of those that values carry in `chain`. operations: a legal sequence.
    """
    if not skips:  # of most models; the machine need not run again
        return [0] * len(operations)
    machine, new = Machine(chain), count()
    lying: dict[Value, Storages] = {}  # of values on the device
    found = []
    for op in operations:
        within = [skip for skip in skips if skip.first <= op.stage <= skip.last]
        both = 0
        if op.kind in FORWARDS:
            source = machine.input_of(op.stage)
            given = {} if source is None else lying.get(source, {})
            made = {skip: given[skip] if skip in given else next(new) for skip in within}
            both = sum(skip.nbytes for skip in within if skip in given)
            lying[op.value] = made
        elif op.kind is OpKind.PREFETCH:
            lying[op.value] = {skip: next(new) for skip in within}
        leaving = (Value(False, op.stage), Value(True, op.stage)) if op.kind is OpKind.B else ()
        held = [storages for v, storages in lying.items() if v not in leaving]
        found.append(sum(_twice(skip, held) for skip in skips) - both)
        machine.step(op)
        lying = {v: storages for v, storages in lying.items() if v in machine.device and v not in leaving}
    return found


def _twice(skip: Skip, held: Collection[Storages]) -> int:
    """Bytes charged beyond those of the storages that there are."""
    storages = [one[skip] for one in held if skip in one]
    return skip.nbytes * (len(storages) - len(set(storages)))
