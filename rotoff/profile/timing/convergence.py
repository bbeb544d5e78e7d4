"""How often something is timed: until the median is known well enough, for long enough, or a fixed number of times.

How well a median is known is told by the distribution-free interval of the sign test (Conover, Practical Nonparametric
Statistics, 3rd ed., section 3.2): of n sorted times t_1 <= ... <= t_n the median lies between t_(1+k) and t_(n-k) but
for a chance of 2 * P(Binomial(n, 1/2) <= k). So a single slow run, however slow, widens nothing once there are nine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...capture.collectives import in_company
from ...errors import OptionError

# of the interval; below six runs it is from the least to the most, which is as sure as there are runs
CONFIDENCE = 0.95
FIXED = 5  # runs, where several processes must run stages equally often
BATCH = 3  # runs between two looks, since a look waits for the device


def half_width(seconds: Sequence[float]) -> float:
    """Half the width of the confidence interval of the median of `seconds`."""
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
    """Times of the same thing, in seconds. scale: what their spread is compared with; default: their median."""

    seconds: Sequence[float]
    scale: float | None = None

    def steady(self, width: float) -> bool:
        scale = statistics.median(self.seconds) if self.scale is None else self.scale
        return half_width(self.seconds) <= width * scale


def more_than_first(seconds: Sequence[float], width: int) -> list[Series]:
    """Of `width` things timed in turn, round after round, what each but the first takes more than the first in the same
    round.

    With times from different moments of a busy machine, what takes a little more might seem to take less.
    """
    rounds = [seconds[n : n + width] for n in range(0, len(seconds) - width + 1, width)]
    scale = statistics.median(one[0] for one in rounds)
    return [Series([one[n] - one[0] for one in rounds], scale) for n in range(1, width)]


@dataclass(frozen=True)
class Repeats:
    """least, most: runs. seconds: that may go by after the least. width: of the interval's half, relative to the
    median."""

    least: int = 3
    most: int = 15
    seconds: float = 0.05
    width: float = 0.02

    @staticmethod
    def read(repeats: int | None) -> Repeats:
        """`repeats` runs; None: until they are steady, or a fixed number where other processes may have to keep pace.

        Raises:
            OptionError: for what is no number of runs.
        """
        if repeats is None:
            return Repeats(FIXED, FIXED) if in_company() else STEADY
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise OptionError(
                f"repeats is {repeats!r}; give a whole number of at least 1, or None to time until steady"
            )
        return Repeats(repeats, repeats)

    def at_least(self, runs: int) -> Repeats:
        """The same where so many `runs` may be enough, unless a number was asked for."""
        return self if self.least == self.most else replace(self, least=runs)

    def rounds(self, look: Callable[[], Sequence[Series]]) -> Iterator[int]:
        """Numbers of the rounds to be run, as long as more are needed; `look` gives what those before took."""
        begun = time.perf_counter()
        yield from range(self.least)
        done = self.least
        if done >= self.most:
            return
        while not all(series.steady(self.width) for series in look()):
            now = time.perf_counter()
            if done == self.least:
                one, end = (now - begun) / done, now + self.seconds
            affordable = int((end - now) / one) if one > 0 else BATCH
            more = min(BATCH, self.most - done, affordable)
            if more < 1:
                return
            yield from range(done, done + more)
            done += more


STEADY = Repeats()  # where no number of runs is asked for
