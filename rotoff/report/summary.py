"""Summaries of what a sequence does with each stage and group of parameters, in the words of logs and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..core.sequence import FORWARDS, UPDATES, Op, OpKind, Sequence, parse_value, w


def fates(sequence: Iterable[Op]) -> dict[int, str]:
    """What a step does with every stage, by rising number: "kept", "reduced" (kept in a smaller form), "moved" (to the
    host and back), "recomputed", or "moved and recomputed"."""
    runs, forms, moved = Counter[int](), dict[int, int](), set[int]()
    for op in sequence:
        if op.kind in FORWARDS:
            runs[op.stage] += 1
            if op.kind in (OpKind.F_SEL, OpKind.F_ALL):
                forms[op.stage] = op.form
        elif op.kind is OpKind.OFFLOAD and not op.of:
            moved.add(op.stage)
    found = {}
    for stage, count in sorted(runs.items()):
        words = [word for word, holds in (("moved", stage in moved), ("recomputed", count > 1)) if holds]
        found[stage] = " and ".join(words) or ("reduced" if forms.get(stage) else "kept")
    return found


def group_fates(sequence: Iterable[Op]) -> dict[int, str]:
    """What a step does with every group of parameters that the sequence names, by rising number: "resident", or some
    of "streamed" (copied in for each use, and not only once after an update on the host), "state moved" (copied in for
    the update), and "updated on the host"."""
    ops = tuple(sequence)
    resident = {parse_value(text) for text in sequence.resident} if isinstance(sequence, Sequence) else set()
    named = {v.stage for v in resident} | {op.stage for op in ops if op.of or op.kind in UPDATES}
    on_host = {op.stage for op in ops if op.kind is OpKind.H}
    fetched = Counter((op.of, op.stage) for op in ops if op.kind is OpKind.PREFETCH)
    found = {}
    for k in sorted(named):
        words = {
            "streamed": fetched["w", k] > (k in on_host and w(k) in resident),
            "state moved": ("o", k) in fetched,
            "updated on the host": k in on_host,
        }
        found[k] = ", ".join(word for word, said in words.items() if said) or "resident"
    return found


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

    def having(found: Mapping[int, str], word: str) -> list[int]:
        return [number for number, said in found.items() if word in said]

    stages, groups = fates(sequence), group_fates(sequence)
    words = {"moved": "moved", "recomputed": "recomputed", "reduced": "kept in a smaller form"}
    parts = [f"{ranges(some)} {said}" for word, said in words.items() if (some := having(stages, word))]
    of_groups = [
        f"parameters {ranges(k for k, said in groups.items() if said == word)} {word}"
        for word in dict.fromkeys(groups.values())
    ]
    return "; ".join([f"stages {', '.join(parts)}" if parts else "everything is kept", *of_groups])
