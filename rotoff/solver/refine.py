"""Refinement on exact bytes: simulated annealing over plans (`solver.plan`), from the best proposals.

Every step decodes a whole plan in compiled code. Effort is counted in plans, never in seconds, and the random numbers are
seeded, so the same chain, limit and options give the same sequence on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..chain import Chain
from ..errors import OptionError
from .plan import ALL, MOVE, evaluator, widened

if TYPE_CHECKING:
    from .search import Candidate

DEFAULT_SECONDS = 2.0
OPERATIONS_PER_SECOND = 4e6  # what this class of machine decodes in one thread; only turns seconds into a count
THREADS = 2
# (and, or) of every code: remat never moves, offload runs every stage forward once and keeps all that autograd saves.
RULES = {"joint": (-1, 0), "remat": (~MOVE, 0), "offload": (MOVE, ALL)}


@dataclass(frozen=True)
class Budget:
    """Effort of the search, in seconds of this class of machine; 0 for none."""

    seconds: float

    @classmethod
    def of(cls, refine: bool | float) -> Budget:
        """Read the option `refine`."""
        if isinstance(refine, bool):
            return cls(DEFAULT_SECONDS if refine else 0.0)
        if not isinstance(refine, (int, float)) or not math.isfinite(refine) or refine < 0:
            raise OptionError(f"refine is {refine!r}; give True, False or a number of seconds")
        return cls(float(refine))

    def evaluations(self, chain: Chain) -> int:
        """Plans to decode in each thread."""
        return int(self.seconds * OPERATIONS_PER_SECOND / (3 * len(chain) + 8))


def refined(
    chain: Chain,
    limit: int,
    mode: str,
    found: list[Candidate],
    budget: Budget,
    progress: Callable[[float, float], None] | None = None,
) -> Candidate:
    """The best candidate after the search; never slower than the best of `found`."""
    from .search import judged

    best = found[0]
    starts = [candidate.codes for candidate in found if candidate.codes is not None and candidate.codes.shape[1] <= 16]
    if not starts or budget.seconds == 0:
        return best
    width = max(4, max(codes.shape[1] for codes in starts[:6]))
    rounds, each = 4, max(1, budget.evaluations(chain) // 4)
    masks = np.array(RULES[mode], dtype=np.int16)
    scale = chain.compute_time or 1.0
    weight = 5 * scale / max(1, limit)
    evaluators = [evaluator(chain, limit, width) for _ in range(THREADS)]
    pool_codes = [widened(codes, width) for codes in starts if codes.shape[1] <= width][:6]
    scores = [evaluators[0].evaluate(codes)[0] for codes in pool_codes]
    with ThreadPoolExecutor(THREADS) as pool:
        for turn in range(rounds):
            jobs = []
            order = np.argsort(np.array(scores), kind="stable")
            for worker in range(THREADS):
                start = pool_codes[order[(worker + (turn if turn < 2 else 0)) % len(order)]].copy()
                out = start.copy()
                hot = scale * (3e-3 if turn < 2 else 1e-3)
                seed = 1 + turn * THREADS + worker
                args = (start, each, seed, hot, hot / 100, masks, weight, out)
                jobs.append((out, pool.submit(evaluators[worker].anneal, *args)))
            for out, job in jobs:
                time = job.result()
                if math.isfinite(time):
                    pool_codes.append(out)
                    scores.append(time)
            if progress is not None:
                progress((turn + 1) / rounds, min(scores))
    winner = min(range(len(scores)), key=lambda x: scores[x])
    if scores[winner] < best.makespan:
        made = judged(chain, limit, pool_codes[winner], "refined")
        if made is not None:
            return made
    return best
