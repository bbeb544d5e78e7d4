"""Summaries of what a sequence does with each stage (keep, move, recompute), in the words of logs and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.sequence import FORWARDS, UPDATES, Op, OpKind, Sequence, parse_value, w


@dataclass(frozen=True)
class Fate:
    """What a step does with one stage.

    stage: its number.
    runs: how often its forward runs.
    moves_saved, moves_output: whether ā or a goes to the host and comes back.
    form: k of the smaller form in which ā is kept, or 0.
    """

    stage: int
    runs: int
    moves_saved: bool
    moves_output: bool
    form: int

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
    """What a step does with every stage, by rising number."""
    runs: dict[int, int] = {}
    forms: dict[int, int] = {}
    moved: set[tuple[int, bool]] = set()
    for op in sequence:
        if op.kind in FORWARDS:
            runs[op.stage] = runs.get(op.stage, 0) + 1
            if op.kind is OpKind.F_SEL:
                forms[op.stage] = op.form
            elif op.kind is OpKind.F_ALL:
                forms[op.stage] = 0
        elif op.of or op.kind in UPDATES:
            continue
        elif op.kind is OpKind.OFFLOAD:
            moved.add((op.stage, op.saved))
    return tuple(
        Fate(
            stage=i,
            runs=count,
            moves_saved=(i, True) in moved,
            moves_output=(i, False) in moved,
            form=forms.get(i, 0),
        )
        for i, count in sorted(runs.items())
    )


@dataclass(frozen=True)
class GroupFate:
    """What a step does with one group of parameters.

    group: its number.
    streams: whether its parameters are copied in for each use, and not only once after an update on the host.
    moves_state: whether the optimizer's state is copied in for the update.
    on_host: whether the host updates it.
    """

    group: int
    streams: bool
    moves_state: bool
    on_host: bool

    @property
    def word(self) -> str:
        """One of "resident", "streamed", "state moved", "streamed, state moved", "updated on the host", "streamed,
        updated on the host".
        """
        words = {"streamed": self.streams, "state moved": self.moves_state, "updated on the host": self.on_host}
        return ", ".join(word for word, said in words.items() if said) or "resident"


def group_fates(sequence: Iterable[Op]) -> tuple[GroupFate, ...]:
    """What a step does with every group of parameters that the sequence names, by rising number."""
    ops = tuple(sequence)
    resident = {parse_value(text) for text in sequence.resident} if isinstance(sequence, Sequence) else set()
    named = {v.stage for v in resident} | {op.stage for op in ops if op.of or op.kind in UPDATES}
    on_host = {op.stage for op in ops if op.kind is OpKind.H}
    fetched = [(op.of, op.stage) for op in ops if op.kind is OpKind.PREFETCH]
    return tuple(
        GroupFate(
            group=k,
            streams=fetched.count(("w", k)) > (k in on_host and w(k) in resident),
            moves_state=("o", k) in fetched,
            on_host=k in on_host,
        )
        for k in sorted(named)
    )


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text, with ranges: ``"1-4, 7"``; ``"none"`` if there are none."""
    found: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if found and n == found[-1][1] + 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found) or "none"


def in_words(sequence: Iterable[Op]) -> str:
    """A summary such as ``"stages 1-3 moved, 4-9 recomputed; parameters 1-9 resident"``."""
    made = fates(sequence)
    moved = [f.stage for f in made if f.moves_saved or f.moves_output]
    recomputed = [f.stage for f in made if f.runs > 1]
    named = {"moved": moved, "recomputed": recomputed, "kept in a smaller form": [f.stage for f in made if f.form]}
    parts = [f"{ranges(numbers)} {word}" for word, numbers in named.items() if numbers]
    groups: dict[str, list[int]] = {}
    for fate in group_fates(sequence):
        groups.setdefault(fate.word, []).append(fate.group)
    stages = f"stages {', '.join(parts)}" if parts else "everything is kept"
    return "; ".join([stages, *(f"parameters {ranges(numbers)} {word}" for word, numbers in groups.items())])
