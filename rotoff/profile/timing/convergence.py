"""How often something is timed: until the median is known well enough, up to a time limit, or a fixed number of times.

The accuracy of a median comes from the distribution-free interval of the sign test (Conover, Practical Nonparametric
Statistics, 3rd ed., section 3.2): among n sorted times t_1 <= ... <= t_n the median lies between t_(1+k) and t_(n-k),
except with probability 2 * P(Binomial(n, 1/2) <= k). From nine runs on, a single slow run, however slow, widens
nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...capture.collectives import several_processes
from ...errors import OptionError

CONFIDENCE = 0.95  # of the interval; fewer than six runs give less, and their whole range is taken
FIXED = 5  # runs, if several processes must run stages equally often
BATCH = 3  # runs between two checks; a check waits for the device
LONG = 0.03  # seconds of a run from which on two runs suffice if they are as alike as AGREED
AGREED = 0.05  # half the interval's width, relative to the median


def half_width(seconds: Sequence[float]) -> float:
    """Return half the width of the confidence interval of the median of `seconds`."""
    ordered, n = sorted(seconds), len(seconds)
    outside = k = 0
    while 2 * k + 3 <= n:
        outside += math.comb(n, k)
        if 2 * outside > (1 - CONFIDENCE) * 2**n:
            break
        k += 1
    k = max(0, k - 1)
    return (ordered[n - 1 - k] - ordered[k]) / 2


@dataclass(frozen=True)
class Series:
    """Times of the same thing, in seconds. scale: what their spread is compared with; by default their median."""

    seconds: Sequence[float]
    scale: float | None = None

    def converged(self, width: float) -> bool:
        scale = statistics.median(self.seconds) if self.scale is None else self.scale
        return half_width(self.seconds) <= width * scale


def more_than_first(seconds: Sequence[float], width: int) -> list[Series]:
    """Given `width` things timed in turn in each round, return how much longer each takes than the first in the same
    round.

    Comparing times from different moments of a busy machine could make something slow look fast.
    """
    rounds = [seconds[n : n + width] for n in range(0, len(seconds) - width + 1, width)]
    scale = statistics.median(one[0] for one in rounds)
    return [Series([one[n] - one[0] for one in rounds], scale) for n in range(1, width)]


@dataclass(frozen=True)
class Repeats:
    """How often to time something.

    Attributes:
        least, most: numbers of runs.
        seconds: that may pass after the least.
        width: half the interval's width at which timing stops, relative to the median.
    """

    least: int = 3
    most: int = 15
    seconds: float = 0.05
    width: float = 0.02

    @staticmethod
    def read(repeats: int | None) -> Repeats:
        """Return the option `repeats`: that many runs. None: until they converge, or a fixed number if other processes
        may have to run equally often.

        Raises:
            OptionError: if it is not a number of runs.
        """
        if repeats is None:
            return Repeats(FIXED, FIXED) if several_processes() else UNTIL_CONVERGED
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise OptionError(
                f"repeats is {repeats!r}; give a whole number of at least 1, or None to time until the median is known"
            )
        return Repeats(repeats, repeats)

    def at_least(self, runs: int) -> Repeats:
        """Return this with the minimum `runs`, unless a fixed number of runs was asked for."""
        return self if self.least == self.most else replace(self, least=runs)

    def rounds(self, look: Callable[[], Sequence[Series]]) -> Iterator[int]:
        """Yield the numbers of the rounds to run, until the series converge. look: returns the times of the rounds so
        far."""
        begun = time.perf_counter()
        for done in range(self.least):
            long = done == 2 and time.perf_counter() - begun >= 2 * LONG and self.least < self.most
            if long and all(series.converged(AGREED) for series in look()):
                return
            yield done
        done = self.least
        if done >= self.most:
            return
        while not all(series.converged(self.width) for series in look()):
            now = time.perf_counter()
            if done == self.least:
                one, end = (now - begun) / done, now + self.seconds
            affordable = int((end - now) / one) if one > 0 else BATCH
            more = min(BATCH, self.most - done, affordable)
            if more < 1:
                return
            yield from range(done, done + more)
            done += more


UNTIL_CONVERGED = Repeats()  # if no number of runs is asked for
