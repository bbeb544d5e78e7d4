"""AUTOSWAP: offload by a weighted average of four priority scores, with the best weights found.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), section 6.1, on AutoSwap (Zhang, Yeung, Shu, He, Wang, 2019): "a score-based heuristic uses a weighted
average of 4 priority scores to decide which activations should be offloaded in priority. The best weight combination is
obtained with Bayesian Optimization."

Interpretation: the four scores are AutoSwap's own. Of ā_i, absent from the end of its last use in the forward phase
to the start of its first one in the backward phase of a step that keeps everything:

1. duration of absence: the seconds of it, less those of both copies;
2. area of absence: that duration times the size (divided by the size if the duration is negative);
3. weighted duration of absence: the integral over it of the bytes above the limit, at most the size, in byte seconds;
4. the same, submodular: computed again after each choice, for the bytes that are then still above the limit.

Each score is divided by the largest one of its kind. ā are taken by falling average until the remaining ones fit at
every operation; the schedule is ordered and no-wait, as all in that paper. A seeded random search replaces Bayesian
optimization of the weights: the corners and the centre of the simplex, then random ones, half of them near the best so
far.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from ...core.chain import Chain
from ...core.sequence import Sequence
from ..arrays import arrays
from ..bounds import min_mem_limit
from .choose import within
from .lowering import Schedule, lower, moving_needs, peak_bytes

TRIALS = 60  # numbers of weights


class Scores:
    """The scores of one chain at one limit; row i - 1 is ā_i for i = 1..L-1, columns are the 2L operations."""

    def __init__(self, chain: Chain, mem_limit: int) -> None:
        c, L = arrays(chain), len(chain)
        self.chain, self.limit = chain, mem_limit
        self.size = c.saved[1:L, 0].astype(float)
        self.seconds = np.concatenate([c.u_F[1:], c.u_B[:0:-1, 0]])
        self.need = np.array(moving_needs(chain), dtype=float)
        t, stage = np.arange(2 * L), np.arange(1, L)[:, None]
        # ā_i is used by F_{i+1} (t = i) and needed back at B_{i+1} (t = 2L - i - 1).
        self.absent = (t > stage) & (t < 2 * L - stage - 1)
        copies = self.size * (1 / chain.d2h_bandwidth + 1 / chain.h2d_bandwidth)
        duration = self.absent @ self.seconds - copies
        area = np.where(duration >= 0, duration * self.size, duration / np.maximum(self.size, 1))
        self.fixed = np.stack([_scaled(duration), _scaled(area), _scaled(self._above(np.zeros(2 * L)))])

    def _above(self, gone: np.ndarray) -> np.ndarray:
        """Byte seconds above the limit that each ā would remove, if `gone` bytes are away at each operation."""
        above = np.maximum(0, self.need - gone - self.limit)
        return ((np.minimum(above, self.size[:, None]) * self.absent) @ self.seconds).astype(float)

    def chosen(self, weights: tuple[float, ...]) -> list[int]:
        """The stages of highest average score such that all operations fit, or all stages if none do."""
        average = np.asarray(weights[:3]) @ self.fixed
        gone, left, out = np.zeros(len(self.need)), np.ones(len(self.size), dtype=bool), []
        while left.any() and (self.need - gone > self.limit).any():
            total = average + (weights[3] * _scaled(self._above(gone)) if weights[3] else 0.0)
            best = int(np.where(left, total, -np.inf).argmax())
            left[best] = False
            gone += self.size[best] * self.absent[best]
            out.append(best + 1)
        return sorted(out)


def _scaled(score: np.ndarray) -> np.ndarray:
    largest = np.abs(score).max(initial=0.0)
    return score / largest if largest else score


def combinations() -> Iterator[tuple[tuple[float, ...], bool]]:
    """Weights to try; (near, True) asks for a neighbour of the best so far, drawn by the same generator."""
    rng = random.Random(0)
    first = [tuple(float(k == corner) for k in range(4)) for corner in range(4)] + [(0.25,) * 4]
    for trial in range(TRIALS):
        if trial < len(first):
            yield first[trial], False
        else:
            drawn = [rng.expovariate(1) for _ in range(4)]
            yield tuple(x / sum(drawn) for x in drawn), trial % 2 == 0


def best(chain: Chain, mem_limit: int) -> tuple[Schedule, tuple[float, ...]] | None:
    """The fastest schedule found within `mem_limit` bytes and its weights; None if none fits."""
    scores = Scores(chain, mem_limit)
    known: dict[tuple[int, ...], Schedule | None] = {}
    found: tuple[Schedule, tuple[float, ...]] | None = None
    for drawn, near in combinations():
        weights = tuple(0.8 * a + 0.2 * b for a, b in zip(found[1], drawn, strict=True)) if near and found else drawn
        out = tuple(scores.chosen(weights))
        if out not in known:
            known[out] = lower(chain, mem_limit, out)
        made = known[out]
        if made is not None and (found is None or made.makespan < found[0].makespan):
            found = made, weights
    return found


def autoswap(chain: Chain, mem_limit: int) -> Sequence:
    """AUTOSWAP's sequence within `mem_limit` bytes."""
    least, most = min_mem_limit(chain, "offload"), max(peak_bytes(chain), *moving_needs(chain))
    made, weights = within("autoswap", mem_limit, lambda limit: best(chain, limit), most, least)
    return Sequence(made.ops, meta={"source": "autoswap, weights " + " ".join(f"{w:.2f}" for w in weights)})
