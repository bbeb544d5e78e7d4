"""The fractional relaxation of Euro-Par 2020 as a linear program, and Problem 2 by trying every set; nothing shared
with the product.

Time is cut where operations start and end. By Lemma 1 bytes are all alike: what counts is how many have left and
returned.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

from rotoff import Chain

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))
import fractional


def interruptible_optimum(chain: Chain, limit: int) -> float | None:
    """Seconds of the fastest schedule with whole values and interruptible copies; None where none fits."""
    times = [
        made.makespan for out in sets(len(chain)) if (made := fractional.timeline(chain, limit, whole(chain, out)))
    ]
    return min(times, default=None)


def sets(L: int):
    return (out for count in range(L) for out in combinations(range(1, L), count))


def whole(chain: Chain, out) -> list[float]:
    """Amounts of `timeline` where each ā of `out` leaves whole."""
    return [float(chain.stage(i).saved_bytes) if i in out else 0.0 for i in range(len(chain) + 1)]
