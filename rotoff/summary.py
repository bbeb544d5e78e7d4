"""What a sequence does with each stage, in words: kept, moved, made again. One owner for the log line, text and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .sequence import FORWARDS, Op, OpKind


@dataclass(frozen=True)
class Fate:
    """What becomes of one stage in a step.

    stage: its number. runs: how often its forward runs. moves_saved, moves_output: whether ā or a goes to the host and
    comes back. form: k of the smaller form in which ā is kept, or 0. kept: ā is made by the first forward and stays on the
    device until the backward.
    """

    stage: int
    runs: int
    moves_saved: bool
    moves_output: bool
    form: int
    kept: bool

    @property
    def word(self) -> str:
        """One of "kept", "reduced", "moved", "recomputed", "moved and recomputed"."""
        moved = self.moves_saved or self.moves_output
        if self.runs > 1:
            return "moved and recomputed" if moved else "recomputed"
        if moved:
            return "moved"
        return "reduced" if self.form else "kept"


def fates(sequence: Iterable[Op]) -> tuple[Fate, ...]:
    """What becomes of every stage, by rising number."""
    runs: dict[int, int] = {}
    forms: dict[int, int] = {}
    moved: set[tuple[int, bool]] = set()
    dropped: set[int] = set()
    for op in sequence:
        if op.kind in FORWARDS:
            runs[op.stage] = runs.get(op.stage, 0) + 1
            if op.kind is OpKind.F_SEL:
                forms[op.stage] = op.form
            elif op.kind is OpKind.F_ALL:
                forms[op.stage] = 0
        elif op.kind is OpKind.OFFLOAD:
            moved.add((op.stage, op.saved))
        elif op.kind is OpKind.DROP and op.saved:
            dropped.add(op.stage)
    return tuple(
        Fate(
            stage=i,
            runs=count,
            moves_saved=(i, True) in moved,
            moves_output=(i, False) in moved,
            form=forms.get(i, 0),
            kept=count == 1 and (i, True) not in moved and i not in dropped,
        )
        for i, count in sorted(runs.items())
    )


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text, runs of them joined: ``"1-4, 7"``; ``"none"`` where there are none."""
    found: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if found and n == found[-1][1] + 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found) or "none"


def in_words(sequence: Iterable[Op]) -> str:
    """What moves and what is recomputed, such as ``"stages 1-3 moved, 4-9 recomputed"``."""
    made = fates(sequence)
    parts = [
        f"{ranges(numbers)} {word}"
        for word, numbers in (
            ("moved", [f.stage for f in made if f.moves_saved or f.moves_output]),
            ("recomputed", [f.stage for f in made if f.runs > 1]),
            ("kept in a smaller form", [f.stage for f in made if f.form]),
        )
        if numbers
    ]
    return f"stages {', '.join(parts)}" if parts else "everything is kept"
