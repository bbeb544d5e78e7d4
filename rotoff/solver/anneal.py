"""Refinement on exact bytes: simulated annealing over plans, from the best proposals.

Every move decodes a whole plan in compiled code. Effort is counted in plans, not in seconds, and the random numbers
are seeded, so the same chain, limit and options give the same sequence on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..core.chain import Chain
from ..errors import OptionError
from .kernels.plan import Evaluator
from .plan_codes import ALL, APART, EARLY, MOVE, evaluator, in_columns

THREADS = 2
WIDEST = 24  # columns: plans with deeper recompute trees are not searched from
DEFAULT_SECONDS = 1.0
USUAL_STAGES, MOST_LONGER = 125, 4.0  # the default effort grows with L / USUAL_STAGES, by at most MOST_LONGER
OPERATIONS_PER_SECOND = 25e6  # assumed decoding rate of one thread; converts seconds into a count
SHARE = {"joint": 1.0, "remat": 0.4, "offload": 0.4}  # a pure mode's space is smaller, and joint searches it again
# Of a mode, (and, or) of every code, and masks of the two fields of a group: remat never moves; offload runs every
# forward once and keeps all that autograd saves.
RULES = {"joint": (-1, 0, -1, -1), "remat": (~(MOVE | APART | EARLY), 0, 0, 0), "offload": (MOVE, ALL, -1, -1)}
# Temperatures at which the rounds start in each thread, as shares of the keep-all time; each ends a hundred times
# colder. The first thread refines the best plan, the second one leaves its local minimum.
ROUNDS = ((3e-3, 3e-3), (1e-3, 3e-2), (1e-3, 3e-3), (1e-3, 1e-3), (3e-4, 3e-3), (3e-4, 1e-3))
# Penalty in each thread: a plan that exceeds the limit by a share x costs weight * x keep-all times more, so the search
# may pass through such plans. Until a plan fits, the weights grow by GROWTH each round, since on a slow link a fitting
# plan may cost many times more. The smallest excess then costs at least NEAREST keep-all times, since otherwise a plan
# one byte over the limit would hold the search. STRAYED raises the weight of a thread that ended over the limit.
OVER_WEIGHTS = (5.0, 50.0)
GROWTH = 10.0
STRAYED = 3.0
FLOAT_ERROR = 1e-12  # relative error of a step time
CLOSE = 1.001  # step time / a bound on it that ends a search shorter than the default: times are off by more
NEAREST = 0.1
FOUND = 4  # plans that are returned at most
Progress = Callable[[float, float], None]  # fraction done, best step time in seconds
COOL_STAGES = 50  # with more stages each is a smaller part of the step, so the start temperatures are lowered


@dataclass(frozen=True)
class Budget:
    """Effort of the search, in nominal seconds (`OPERATIONS_PER_SECOND`); 0 for none.

    own: whether it is the default, which is larger for long chains, because their tables take longer anyway. near: step
    time / a bound on it that ends the search. bound: seconds that no step can beat, if that is known.
    """

    seconds: float
    own: bool = False
    near: float = 1 + FLOAT_ERROR
    bound: float = 0.0

    @classmethod
    def of(cls, refine: bool | float) -> Budget:
        """Read the option `refine`."""
        if isinstance(refine, bool):
            return cls(DEFAULT_SECONDS if refine else 0.0, own=True)
        if not isinstance(refine, (int, float)) or not math.isfinite(refine) or refine < 0:
            raise OptionError(f"refine is {refine!r}; give True, False or a number of seconds")
        return cls(float(refine), near=CLOSE if refine < DEFAULT_SECONDS else 1 + FLOAT_ERROR)

    def enough(self, chain: Chain) -> float:
        """Seconds of a step from which on no faster one is looked for."""
        return self.near * max(self.bound, least_compute(chain))

    def evaluations(self, chain: Chain, mode: str) -> int:
        """Plans to decode in each thread."""
        longer = min(MOST_LONGER, max(1.0, len(chain) / USUAL_STAGES)) if self.own else 1.0
        return int(SHARE[mode] * longer * self.seconds * OPERATIONS_PER_SECOND / (3 * len(chain) + 8))

    def part(self, share: float) -> Budget:
        """The budget times `share`."""
        return replace(self, seconds=share * self.seconds)


def least_compute(chain: Chain) -> float:
    """A lower bound in seconds for every plan: each forward and backward once, in its fastest form, and the updates
    that the host cannot do."""
    stages = sum(s.forward_time + min(s.form(k).backward_time for k in range(1 + len(s.forms))) for s in chain.stages)
    return stages + sum(
        group.update_time for group in chain.parameters if group.grad_bytes and group.host_update_time is None
    )


@dataclass(frozen=True)
class Problem:
    """limit, host_limit: bytes. slots: N of the joint dynamic program. known: plans to start from."""

    chain: Chain
    limit: int
    host_limit: int | None
    slots: int
    budget: Budget
    updates: str = "during"
    known: tuple[np.ndarray, ...] = ()
    mode: str = "joint"


class Found(NamedTuple):
    """A plan in the order of the best: whether it exceeds a limit, its seconds with the penalty for that, its number,
    its bytes over both limits."""

    exceeds: bool
    score: float
    number: int
    excess: int
    plan: np.ndarray


def in_threads(
    threads: ThreadPoolExecutor, kernels: Sequence[Callable[..., float]], calls: Iterable[tuple[Any, ...]]
) -> list[float]:
    """Call each of the compiled searches in a thread of its own. An interrupt stops them: they run without the GIL, and
    look at their last argument, which comes from here."""
    stop = np.zeros(1, dtype=np.int8)
    jobs = [threads.submit(kernel, *call, stop) for kernel, call in zip(kernels, calls, strict=True)]
    try:
        return [job.result() for job in jobs]
    except BaseException:
        stop[0] = 1
        raise


def annealed(
    problem: Problem,
    decoders: Sequence[Evaluator],
    starts: Iterable[np.ndarray],
    rounds: Sequence[tuple[float, ...]],
    each: int,
    weights: Sequence[float],
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """The best plans found that fit, from `starts`, which need not fit; the best first, and one of those that take
    equally long.

    Every round anneals in each thread, with `each` changes: one from the best plan so far, one from the next start. The
    search ends early at a plan that is fast enough for the budget.

    Args:
        decoders: one for each thread. rounds: temperatures at which the threads start, as shares of the keep-all time;
            each ends a hundred times colder.
        weights: what a plan over the limit by a share x costs more in each thread, in keep-all times and x.
    """
    scale, enough, found = problem.chain.compute_time or 1.0, problem.budget.enough(problem.chain), list[Found]()
    dear = [weight * scale / max(1, problem.limit) for weight in weights]

    def add(plan: np.ndarray) -> None:
        makespan, *over = decoders[0].judge(plan)
        found.append(Found(any(over), makespan + dear[0] * sum(over), len(found), sum(over), plan))

    for plan in starts:
        add(plan)
    mask = np.array(RULES[problem.mode], dtype=np.int16)
    with ThreadPoolExecutor(THREADS) as threads:
        for turn, heats in enumerate(rounds if each and found else ()):
            order = sorted(found)
            best = order[0]
            if not best.exceeds and best.score <= enough:
                if progress is not None:
                    progress(1.0, best.score)
                break
            firsts = [best.plan, order[(1 + turn) % len(order)].plan]
            lasts, bests = ([plan.copy() for plan in firsts] for _ in range(2))
            hot = [heat * max(scale, 0.0 if best.exceeds else best.score) for heat in heats]
            calls = [
                (lasts[n], each, 1 + turn * THREADS + n, hot[n], hot[n] / 100, mask, dear[n], bests[n])
                for n in range(THREADS)
            ]
            for n, seconds in enumerate(in_threads(threads, [decoder.anneal for decoder in decoders], calls)):
                add(bests[n] if math.isfinite(seconds) else lasts[n])
                if not min(found).exceeds and any(decoders[n].judge(lasts[n])[1:]):
                    dear[n] *= STRAYED
            best = min(found)
            if best.exceeds:
                nearest = NEAREST * scale / min(one.excess for one in found)
                dear = [max(GROWTH * weight, nearest) for weight in dear]
            if progress is not None:
                progress((turn + 1) / len(rounds), best.score)
    fitting = {one.score: one.plan for one in sorted(found, reverse=True) if not one.exceeds}
    return [fitting[score] for score in sorted(fitting)[:FOUND]]


def refined(problem: Problem, starts: Iterable[np.ndarray], progress: Progress | None = None) -> np.ndarray | None:
    """The best plan that fits, found from `starts`, for a chain without parameters; None if none was found."""
    chain, starts = problem.chain, [codes for codes in starts if codes.shape[1] <= WIDEST]
    if not starts or problem.budget.seconds == 0:
        return None
    width = max(codes.shape[1] for codes in starts)
    found = annealed(
        problem,
        [evaluator(chain, problem.limit, width, problem.host_limit) for _ in range(THREADS)],
        [in_columns(codes, width).ravel() for codes in starts],
        [tuple(min(1.0, COOL_STAGES / len(chain)) * heat for heat in heats) for heats in ROUNDS],
        max(1, problem.budget.evaluations(chain, problem.mode) // len(ROUNDS)),
        OVER_WEIGHTS,
        progress,
    )
    return found[0].reshape(-1, width) if found else None
