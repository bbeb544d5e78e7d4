"""Searches for the largest number that works, with few questions."""

from __future__ import annotations

import math
from collections.abc import Callable

GROWTH = 16  # next number / largest that works, at most, while none has been refused
PATIENCE = 2  # answers in a row that do not halve the open interval, before the middle is tried
MOST = 2**20


def searched(left: Callable[[int], int], last: int, first: int = 1) -> dict[int, int]:
    """What is `left` with some numbers, among them the largest one up to `last` that leaves nothing negative, and the
    next one. A larger number must leave less. first: is asked first.

    What is left falls about as a line or a parabola, so the next number is where a line through the two answers nearest
    to 0 meets it; if that converges slowly, the middle of the open interval.
    """
    tried = dict[int, int]()
    low, high, slow, guess = 0, last + 1, 0, min(first, last)
    while True:
        tried[guess] = left(guess)
        before = high - low
        low, high = (guess, high) if tried[guess] >= 0 else (low, guess)
        if low + 1 == high:
            return tried
        halved = 2 * (high - low) <= before or len(tried) == 1
        slow = 0 if halved or slow == PATIENCE else slow + 1
        most = high - 1 if high in tried else min(GROWTH * low, last)
        n, *others = sorted(tried, key=lambda n: abs(tried[n]))
        slope = (tried[others[0]] - tried[n]) / (others[0] - n) if others else 0.0
        if not others:
            guess += max(1, guess // GROWTH) * (1 if low else -1)
        elif slow == PATIENCE:
            guess = (low + most + 1) // 2
        else:
            guess = math.floor(n - tried[n] / slope) if slope < 0 else most
        guess = max(low + 1, min(guess, most))


def largest_within(room: int, needs: Callable[[int], int], first: int, last: int = MOST) -> int | None:
    """The largest number up to `last` that needs at most `room` bytes; None if none does. first: about where it is."""
    tried = searched(lambda n: room - needs(n), last, first)
    return max((n for n, left in tried.items() if left >= 0), default=None)
