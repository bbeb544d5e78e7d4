"""Questions that a forward asks of random numbers alone (LayerDrop: ``if torch.rand([]) < p``), and whether they turn out differently.

A recording holds one course of the forward. Where a question's answer follows from numbers drawn and nothing else, it cannot be
asked before the step: which numbers are drawn depends on all that draws before it. So it must have one answer: with p = 0 it has.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MeasureError
from ..runtime.replay import preserved
from .tape import NOTHING, Operation, Ref, Tape, leaves, substitute

DRAWS = 500  # of the numbers of a question: what comes up once in a hundred times is found but for 1 in 150
NUMBERS = 1024  # bytes that a question of chance is made from, at most


def check(tape: Tape, name: str, device: torch.device) -> None:
    """Raises:
    MeasureError: where the forward of `name` takes one of several ways by chance.
    """
    chance: dict[int, Operation] = {}  # variable that follows from numbers drawn alone -> what made it
    drawn: set[int] = set()
    asked: list[Operation] = []
    for op in tape.operations:
        if any(n not in chance for n in op.reads) or not _plain(op):
            continue
        random = op.draws or any(n in drawn for n in op.reads)
        if op.expected is not NOTHING and random:
            asked.append(op)
        for n in op.outputs:
            if n is not None and not op.writes and tape.variables[n].nbytes <= NUMBERS:
                chance[n] = op
                if random:
                    drawn.add(n)
    with preserved([], device), torch.no_grad():
        for op in asked:
            if any(_answer(op, chance, {}) != op.expected for _ in range(DRAWS)):
                where = f" in module {op.place[-1][0]!r}" if op.place and op.place[-1][0] else ""
                raise MeasureError(
                    f"the forward of {name} skips or takes some of its modules by chance{where} (LayerDrop), and rotoff plans"
                    " one course of a forward; set that probability (layerdrop, encoder_layerdrop, decoder_layerdrop) to 0"
                )


def _plain(op: Operation) -> bool:
    """Whether the operation reads nothing but its variables and plain values."""
    return (
        not op.effect
        and not any(isinstance(leaf, torch.Tensor) for leaf in leaves((op.args, op.kwargs)))
        and not any(True for _ in op.owned())
    )


def _answer(op: Operation, made_by: dict[int, Operation], known: dict[int, torch.Tensor]) -> Any:
    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        if leaf.variable not in known:
            maker = made_by[leaf.variable]
            results = _answer(maker, made_by, known)
            results = results if isinstance(results, (tuple, list)) else (results,)
            known.update({n: t for n, t in zip(maker.outputs, results, strict=False) if n is not None})
        return known[leaf.variable]

    return op.function(*substitute(op.args, value), **substitute(op.kwargs, value))
