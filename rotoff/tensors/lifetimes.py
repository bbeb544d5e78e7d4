"""How long the plain model holds what a stage makes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """A storage that autograd does not save, or for nothing. begin: the position on the tape from which the model holds
    it for nothing that its stage does there: past its last use, or from its making. end: the last position at which it
    is there, None where that is not known. leads: the last piece that runs something on what its graph ends in; one
    that ends before has it in its ā."""

    storage: int
    nbytes: int
    begin: int
    end: int | None
    leads: int = -1


class HeldElsewhere(NamedTuple):
    """A storage that stays whatever a plan drops (`Tape.held`). saved: whether autograd saves something in it, too."""

    storage: int
    nbytes: int
    saved: bool


class Lifetimes(NamedTuple):
    """Of one piece of a tape, or several. ends: the storages that the model's own code lets go of in it. spans: of
    those that it makes. piece: the number of the last. held: of those that it makes, which stay whatever is dropped."""

    ends: frozenset[int] = frozenset()
    spans: tuple[Span, ...] = ()
    piece: int = 0
    held: tuple[HeldElsewhere, ...] = ()

    def and_then(self, following: Lifetimes) -> Lifetimes:
        """Of both pieces as one."""
        ends, spans, held = self.ends | following.ends, self.spans + following.spans, self.held + following.held
        return Lifetimes(ends, spans, following.piece, held)

    def outliving(self, charged: Collection[int]) -> list[Span]:
        """What stays when the piece ends; charged: storages that are accounted for."""
        return [span for span in self._apart(charged) if span.storage not in self.ends]

    def beside_bytes(self, charged: Collection[int]) -> int:
        """The most bytes of what goes before the piece ends, where they are there for nothing."""
        changes: dict[int, int] = {}
        for span in self._apart(charged):
            if span.storage in self.ends and span.end is not None and span.begin <= span.end:
                changes[span.begin] = changes.get(span.begin, 0) + span.nbytes
                changes[span.end + 1] = changes.get(span.end + 1, 0) - span.nbytes
        return max(accumulate(changes[position] for position in sorted(changes)), default=0)

    def _apart(self, charged: Collection[int]) -> list[Span]:
        """Those that are neither `charged` nor in the ā of what ends here."""
        return [span for span in self.spans if span.storage not in charged and span.leads <= self.piece]


UNSEEN = Lifetimes()
