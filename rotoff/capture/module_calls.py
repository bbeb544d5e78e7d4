"""Calls of modules in a recorded forward. The call of a module whose work depends on data becomes one operation.

That it depends on data shows while the module runs, so its calls are recorded like all others and joined at the end. To
measure the joined operation, these calls are made again, and not the module's own code: what that code changes outside
of the model stays as the one forward left it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..tensors.autocast import Autocast
from ..tensors.kernel_flags import KernelFlags
from .places import Entry, alone
from .tape import Owned, Pinned, RecordedCall, Ref, Tape, substitute


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, running or finished.

    Attributes:
        number: of this call among all, from 1.
        entry: as in `places`.
        given: the variables among its arguments.
        versions: of the tensors among them.
        transformed: whether a transform of torch.func is active.
        drawn: the generators' states.
        begin, end: its operations.
        made: the number of operations before it that make or change tensors.
        until: how many calls of modules had begun when it ended.
        place, outputs, grad, autocast, kernels: as in `RecordedCall`.
    """

    module: nn.Module
    name: str
    number: int
    entry: Entry
    begin: int
    made: int
    given: tuple[int, ...]
    versions: list[int]
    transformed: bool
    drawn: Any
    grad: bool
    autocast: Autocast
    kernels: KernelFlags
    place: tuple[tuple[str, int], ...] = ()
    end: int = 0
    until: int = 0
    outputs: tuple[int | None, ...] = ()


def as_one(
    tape: Tape, calls: Sequence[ModuleCall], modules: Collection[nn.Module], instead: Mapping[int, RecordedCall]
) -> None:
    """Replace the calls of `modules` by one operation each; of nested calls, the outermost.

    Args:
        instead: replacements of operations within them, by number.
    """
    operations: list[RecordedCall] = []
    before = list(accumulate((op.makes for op in tape.operations), initial=0))
    last = {n: k for k, op in enumerate(tape.operations) for n in op.reads}
    last.update(dict.fromkeys(tape.result_variables(), len(tape.operations)))
    renumbered: dict[int, int] = {}  # number of operations before an entry that make something, before and after
    made = at = until = 0

    def take(end: int) -> None:
        nonlocal made, at
        for n in range(at, end):
            renumbered.setdefault(before[n], made)
            operations.append(tape.operations[n])
            made += tape.operations[n].makes
        at = end
        renumbered.setdefault(before[at], made)

    for n, call in enumerate(calls):
        if n < until:
            tape.entries.pop(call.entry, None)
        elif call.module in modules and call.begin < call.end:
            take(call.begin)
            inner = tape.operations[call.begin : call.end]
            operations.append(_as_operation(tape, call, inner, {n for n, k in last.items() if k >= call.end}))
            tape.inner[id(operations[-1])] = tuple(instead.get(n, op) for n, op in enumerate(inner, start=at))
            made, at, until = made + 1, call.end, call.until
    take(len(tape.operations))
    tape.entries.update({entry: renumbered[count] for entry, count in tape.entries.items()})
    tape.operations = operations


def _as_operation(tape: Tape, call: ModuleCall, inner: Sequence[RecordedCall], later: Set[int]) -> RecordedCall:
    """Return the operation that stands for those made in a call. later: the variables that are read after it."""
    reads, born = dict.fromkeys(call.given), set[int]()
    for op in inner:
        reads.update(dict.fromkeys(n for n in op.reads if n not in born))
        born.update(n for n in op.made if n not in reads)
    beside = tuple(sorted((born & later).difference(call.outputs)))
    saves = tuple(dict.fromkeys(one for op in inner for one in op.saves))
    seen = {tape.variables[n].storage for n in (*reads, *call.outputs, *beside) if n is not None} | {
        n for n, _ in saves
    }
    inner_storages = {tape.variables[n].storage for n in born} - seen
    return RecordedCall(
        function=call.module,
        args=tuple(map(Ref, call.given)),
        kwargs={},
        outputs=call.outputs + beside,
        reads=tuple(reads),
        writes=frozenset().union(*(op.writes for op in inner)),
        writes_owned=tuple(dict.fromkeys(owned for op in inner for owned in op.writes_owned)),
        draws=any(op.draws for op in inner),
        grad=call.grad,
        autocast=call.autocast,
        kernels=call.kernels,
        effect=True,
        place=call.place,
        saves=saves,
        ends=tuple(dict.fromkeys(n for op in inner for n in op.ends if n not in inner_storages)),
        keys=alone(call.entry, call.module),
        beside=len(beside),
    )


def pinned(operation: RecordedCall, tensors: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]) -> RecordedCall:
    """Return `operation` with the sizes that it gave when it was recorded, although they depend on numbers: measuring
    draws other random numbers than the step. Whole numbers that it returned are kept, or else those that it received.

    Args:
        tensors: its arguments, in order.
    """
    if not any(t.is_floating_point() or t.is_complex() for t in returned):
        return replace(operation, function=_given, args=([*map(Pinned, returned)],), kwargs={}, reads=())
    waiting = iter(tensors)

    def kept(leaf: Any) -> Any:
        tensor = next(waiting) if isinstance(leaf, (Ref, Owned, torch.Tensor)) else None
        if not isinstance(leaf, Ref) or tensor is None or tensor.is_floating_point() or tensor.is_complex():
            return leaf
        return Pinned(tensor)

    args, kwargs = substitute((operation.args, operation.kwargs), kept)
    return replace(operation, args=args, kwargs=kwargs)


def _given(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors
