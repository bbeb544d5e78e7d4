"""Searches for the largest number that works, with few questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

GROWTH = 16  # next number / largest that works, at most, while none has been refused
PATIENCE = 2  # answers in a row that do not halve the open interval, before the middle is tried
MOST = 2**20


Margins = Mapping[str, float]  # what is left of each thing that a number needs; none is negative if it works


def works(margins: Margins) -> bool:
    """Whether a number works."""
    return min(margins.values()) >= 0


def searched(ask: Callable[[int], Margins], last: int, first: int = 1) -> dict[int, Margins]:
    """Margins by number, among them those of the largest number up to `last` that works and of the next one. A larger
    number must need more. first: is asked first.

    Margins fall about as a line or a parabola, so the next number is where a line through two answers meets 0; if that
    converges slowly, the middle of the open interval.
    """
    tried = dict[int, Margins]()
    low, high, slow, guess = 0, last + 1, 0, min(first, last)
    while True:
        tried[guess] = ask(guess)
        before = high - low
        low, high = (guess, high) if works(tried[guess]) else (low, guess)
        if low + 1 == high:
            return tried
        halved = 2 * (high - low) <= before or len(tried) == 1
        slow = 0 if halved or slow == PATIENCE else slow + 1
        most = high - 1 if high in tried else min(GROWTH * low, last)
        if len(tried) == 1:
            guess += max(1, guess // GROWTH) * (1 if low else -1)
        else:
            guess = (low + most + 1) // 2 if slow == PATIENCE else min(_roots(tried), default=most)
        guess = max(low + 1, min(guess, most))


def _roots(tried: Mapping[int, Margins]) -> Iterator[int]:
    """For each margin, the largest number at which the line through its two values nearest to 0 is not negative."""
    for name in {name for margins in tried.values() for name in margins}:
        known = [(abs(margins[name]), n, margins[name]) for n, margins in tried.items() if name in margins]
        if len(known) > 1:
            (_, n, found), (_, other, there) = sorted(known)[:2]
            slope = (there - found) / (other - n)
            if slope < 0:
                yield math.floor(n - found / slope)


def largest_within(room: int, needs: Callable[[int], int], first: int, last: int = MOST) -> int | None:
    """The largest number up to `last` that needs at most `room` bytes; None if none does. first: about where it is."""
    tried = searched(lambda n: {"bytes": room - needs(n)}, last, first)
    return max((n for n, margins in tried.items() if works(margins)), default=None)
