"""Code that both searches share: the plans found so far, and a round of annealing from them in each thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

THREADS = 2


class Pool:
    """Plans found so far.

    Args:
        plans: the first plans.
        judge: returns the seconds of a plan, and its bytes over the limit.
        weights: seconds that a byte over the limit costs, in each thread; the first counts for scores.
    """

    def __init__(
        self, plans: Sequence[np.ndarray], judge: Callable[[np.ndarray], tuple[float, int]], weights: list[float]
    ) -> None:
        self.weights = weights
        self.excess: list[int] = []  # each plan's bytes over the limit
        self._judge = judge
        self._plans: list[np.ndarray] = []
        self._scores: list[tuple[bool, float]] = []
        self._stop = np.zeros(1, dtype=np.int8)
        for plan in plans:
            self.add(plan)

    def add(self, plan: np.ndarray) -> None:
        makespan, over = self._judge(plan)
        self._plans.append(plan)
        self.excess.append(over)
        self._scores.append((bool(over), makespan + self.weights[0] * over))

    def gained(self, first: int) -> bool:
        """Whether the plan added last is better than plan `first`."""
        return self._scores[-1] < self._scores[first]

    @property
    def best(self) -> tuple[bool, float]:
        """(whether it exceeds the limit, seconds with the penalty for that) of the best plan."""
        return min(self._scores)

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return not all(self.excess)

    def winners(self, most: int) -> list[np.ndarray]:
        """The best plans that fit, the best first, at most `most`; of those that take equally long, one."""
        order = {self._scores[n]: n for n in reversed(self.ranked()) if not self._scores[n][0]}
        return [self._plans[order[score]] for score in sorted(order)[:most]]

    def ranked(self) -> list[int]:
        """The numbers of all plans, the best first."""
        return sorted(range(len(self._scores)), key=lambda n: self._scores[n])

    def annealed(
        self,
        threads: ThreadPoolExecutor,
        kernels: Sequence[Callable[..., float]],
        firsts: Sequence[int],
        each: int,
        turn: int,
        heats: Sequence[float],
        rules: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Anneal one of the plans `firsts` in each thread with `each` changes, from a temperature of `heats` seconds
        down to a hundredth of it. Yields for each thread its last plan, and the best one that fits, if any."""
        jobs = []
        for worker, (kernel, first, hot) in enumerate(zip(kernels, firsts, heats, strict=True)):
            last, best = self._plans[first].copy(), self._plans[first].copy()
            seed = 1 + turn * THREADS + worker
            args = (last, each, seed, hot, hot / 100, rules, self.weights[worker], best, self._stop)
            jobs.append((last, best, threads.submit(kernel, *args)))
        for last, best, job in jobs:
            yield last, best if math.isfinite(self._result(job)) else None

    def _result(self, job: Future[float]) -> float:
        """The result of `job`; an interrupt stops the kernels, which run without the GIL."""
        try:
            return job.result()
        except BaseException:
            self._stop[0] = 1
            raise
