"""Replays in place of forms: a stage that stores next to nothing may as well run again, and is then expected to end
early.

The machine charges a replay a whole forward_time, so a solver takes a form that stores nothing where a replay is
expected to take less: its tail is left out (`tails`). Here the one is put for the other in a solved sequence where that
fits and the expected step gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.sequence import Op, OpKind
from ..errors import InvalidSequenceError


def replay_forms(operations: Sequence[Op], expected: Callable[[Sequence[Op]], float]) -> tuple[Op, ...]:
    """`operations` with ``F_ck i`` and, before ``B i``, ``F_all i`` in place of ``F_sel i k``, where `expected` says it
    is faster.

    All of them are tried at once, and halves of what did not help, so that long sequences take few questions.

    Args:
        expected: seconds of a step; raises `InvalidSequenceError` where the machine or the limit does not allow it.
    """
    best, time = tuple(operations), expected(operations)
    waiting = [stages] if (stages := _exchangeable(operations)) else []
    while waiting:
        stages = waiting.pop()
        tried = _exchanged(best, frozenset(stages))
        try:
            found = expected(tried)
        except InvalidSequenceError:
            found = time
        if found < time:
            best, time = tried, found
        elif len(stages) > 1:
            half = len(stages) // 2
            waiting += [stages[half:], stages[:half]]
    return best


def _exchangeable(operations: Sequence[Op]) -> list[int]:
    """Stages whose ā is made once, in a form, and stays where it is until its ``B``."""
    made: dict[int, int] = {}
    others: set[int] = set()
    for op in operations:
        if op.kind is OpKind.F_SEL:
            made[op.stage] = made.get(op.stage, 0) + 1
        elif op.kind is not OpKind.B and op.value.saved:
            others.add(op.stage)
    return [i for i, times in made.items() if times == 1 and i not in others]


def _exchanged(operations: Sequence[Op], stages: frozenset[int]) -> tuple[Op, ...]:
    made: list[Op] = []
    for op in operations:
        if op.stage in stages and op.kind is OpKind.B:
            made.append(Op(OpKind.F_ALL, op.stage))
        made.append(Op(OpKind.F_CK, op.stage) if op.stage in stages and op.kind is OpKind.F_SEL else op)
    return tuple(made)
