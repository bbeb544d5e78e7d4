"""How long the plain model holds the storages that a stage makes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """A storage that autograd does not save, or saves in a graph that nothing needs.

    begin: the position on the tape from which the model holds it without need: after its last use, or when it is made
    if it has none. end: the last position at which it exists; None if unknown. leads: the last piece that reads a
    tensor whose graph saves it; a piece that ends before has it in its ā."""

    storage: int
    nbytes: int
    begin: int
    end: int | None
    leads: int = -1


class HeldElsewhere(NamedTuple):
    """A storage that stays whatever a plan drops (`Tape.held`). saved: whether autograd also saves a tensor in it."""

    storage: int
    nbytes: int
    saved: bool


class Lifetimes(NamedTuple):
    """Lifetimes of storages in one piece of a tape, or several in a row. ends: storages that the model's own code
    releases there. spans, held: of storages that are made there. piece: the number of the last piece."""

    ends: frozenset[int] = frozenset()
    spans: tuple[Span, ...] = ()
    piece: int = 0
    held: tuple[HeldElsewhere, ...] = ()

    def and_then(self, following: Lifetimes) -> Lifetimes:
        """Return the lifetimes of this and the `following` piece as one."""
        ends, spans, held = self.ends | following.ends, self.spans + following.spans, self.held + following.held
        return Lifetimes(ends, spans, following.piece, held)

    def outliving(self, charged: Collection[int]) -> list[Span]:
        """Return the spans that outlive the piece. charged: storages that are accounted for."""
        return [span for span in self._apart(charged) if span.storage not in self.ends]

    def beside_bytes(self, charged: Collection[int]) -> int:
        """Return the most bytes that are held at once without need and released before the piece ends."""
        changes: dict[int, int] = {}
        for span in self._apart(charged):
            if span.storage in self.ends and span.end is not None and span.begin <= span.end:
                changes[span.begin] = changes.get(span.begin, 0) + span.nbytes
                changes[span.end + 1] = changes.get(span.end + 1, 0) - span.nbytes
        return max(accumulate(changes[position] for position in sorted(changes)), default=0)

    def _apart(self, charged: Collection[int]) -> list[Span]:
        """Return the spans that are neither `charged` nor in the ā of this piece."""
        return [span for span in self.spans if span.storage not in charged and span.leads <= self.piece]


UNSEEN = Lifetimes()
