"""Bytes of skip connections that the machine charges more than once.

Each value that carries a skip is charged for it, since each may be offloaded alone. While stages only pass the skip on,
these values share one storage. A prefetched value has the skip in a storage of its own, and so has each new run of the
stage that makes it. The transient bytes were measured with a stage's input and output sharing the skip, so nothing is
subtracted between those two, nor for values that a ``B`` frees piece by piece.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count

from ..core.chain import Chain
from ..core.sequence import FORWARDS, UPDATES, OpKind, Sequence, Value
from ..core.simulator import Machine
from ..core.steady_step import at_rest
from ..profile.memory.skips import Skip

Storages = Mapping[Skip, int]  # the storage of each skip in a value, by number


def shared_bytes(chain: Chain, skips: Collection[Skip], operations: Sequence) -> list[int]:
    """For each operation, a lower bound of the bytes that are charged more than once on the device.

    skips: the skips that values carry in `chain`. operations: a legal sequence.
    """
    if not skips:  # as in most models; saves a run of the machine
        return [0] * len(operations)
    machine, new = Machine(chain, rest=at_rest(chain, operations.ops, operations.resident)), count()
    lying: dict[Value, Storages] = {}  # for each value on the device
    found = []
    for op in operations:
        if op.of or op.kind in UPDATES:  # of parameters
            found.append(sum(_twice(skip, lying.values()) for skip in skips))
            machine.step(op)
            continue
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
    """Bytes charged for `skip` beyond the storages that exist."""
    storages = [one[skip] for one in held if skip in one]
    return skip.nbytes * (len(storages) - len(set(storages)))
