"""Questions that a forward asks of random numbers alone (LayerDrop: ``if torch.rand([]) < p``), and whether they turn out
differently.

A recording holds one course of the forward. Where a question's answer follows from numbers drawn and nothing else, it cannot
be asked before the step: which numbers are drawn depends on all that draws before it. So it must have one answer: with p = 0
it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import MeasureError
from ..runtime.replay import preserved
from .tape import NOTHING, Operation, Ref, Tape, leaves, substitute
from .unrepeatable import UncuttableError

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
                raise refusal(name, op.place[-1][0] if op.place else "")


def refusal(name: str, place: str) -> MeasureError:
    """Of a forward of `name` that takes one of several ways by chance, in the module `place`."""
    where = f" in module {place!r}" if place else ""
    return (MeasureError if place else UncuttableError)(
        f"the forward of {name} skips or takes some of its modules by chance{where} (LayerDrop), and rotoff plans"
        " one course of a forward; set that probability (layerdrop, encoder_layerdrop, decoder_layerdrop) to 0"
    )


def extremes(
    tape: Tape, function: Callable[..., Any], references: Any, reads: Sequence[int], device: torch.device
) -> tuple[float, float] | None:
    """The least and the most of `DRAWS` answers to a question (a call of `function`), if it follows from numbers drawn alone.

    Such a number may be of no consequence: a choice among one size of image. What is so with both is taken to be so with all.
    """
    needed, made_by = set(reads), []
    for op in reversed(tape.operations):
        if not needed.isdisjoint(n for n in op.outputs if n is not None):
            if not _plain(op) or any(tape.variables[n].nbytes > NUMBERS for n in op.outputs if n is not None):
                return None
            needed.update(op.reads)
            made_by.append(op)
    made = {n for op in made_by for n in op.outputs}
    if not needed <= made or not any(op.draws for op in made_by):
        return None

    def answer() -> float:
        known: dict[int, torch.Tensor] = {}

        def value(leaf: Any) -> Any:
            return known[leaf.variable] if isinstance(leaf, Ref) else leaf

        for op in reversed(made_by):
            results = op.function(*substitute(op.args, value), **substitute(op.kwargs, value))
            results = results if isinstance(results, (tuple, list)) else (results,)
            known.update({n: t for n, t in zip(op.outputs, results, strict=False) if n is not None})
        return float(function(*substitute(references[0], value), **substitute(references[1], value)))

    with preserved([], device), torch.no_grad():
        answers = [answer() for _ in range(DRAWS)]
    return min(answers), max(answers)


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
