"""The search for chains with parameters: placements by rule, under several plans for the activations, then annealing.

Every move of the search decodes a whole steady step in compiled code (`kernels.place`). As in `solver.anneal`, effort
is counted in plans and random numbers are seeded, so equal inputs give equal sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from ..core.sequence import Sequence
from ..core.simulator import simulate
from . import remat
from .anneal import THREADS, Problem, Progress, annealed
from .bounds import HostPlan, host_plan, min_mem_limit
from .genes import (
    EVERYWHERE,
    FLAGS,
    GRADIENT_LEAVES,
    MASK,
    ON_HOST,
    STATE_LEAVES,
    STEPS_ASIDE,
    at_home,
    joined,
    placer,
    to_sequence,
)
from .host import all_moving, host_step
from .plan_codes import MOVE, empty, in_columns, keep_all

EFFORT = 200_000  # plans decoded in each thread where `refine` is 1: some 4 s for 34 stages
LONGEST = 100  # stages: of longer chains, and of those with more groups than stages, fewer plans are decoded
SHARE = {"joint": 0.6, "offload": 0.3, "remat": 0.1}  # joint runs the others first, and begins where they ended
VISITS = 4  # columns of the stages' codes; later visits are as the last
# Temperatures at which the rounds start, as shares of the keep-all time; each ends a hundred times colder.
HEATS: tuple[float, ...] = (3e-2, 2e-2, 1e-2, 3e-3)
# A plan over the limit by a share x costs that many keep-all times x more at first, and ten times that at the end of a
# round.
WEIGHTS = (0.5, 2.0)
# Both where a stage's groups do not fit together: steps take many keep-all times, and so do plans over the limit.
TIGHT = (3e-3, 3e-3, 1e-3, 1e-3), (50.0, 200.0)
TABLE_WORK = 50_000_000  # states times choices of the recompute tables: some hundredths of a second
KEPT = 8  # starts


def searched(problem: Problem, progress: Progress | None = None) -> list[np.ndarray]:
    """The best plans found, the best first, which is at least as good as any known one; none if none fits."""
    chain = problem.chain
    L, K = len(chain), len(chain.parameters)
    heats, weights = TIGHT if _do_not_fit_together(problem) else (HEATS, WEIGHTS)
    shorter = min(1.0, LONGEST / L) * min(1.0, 2 * L / (L + K))
    return annealed(
        problem,
        [placer(chain, problem.limit, VISITS, problem.updates, problem.host_limit) for _ in range(THREADS)],
        [*problem.known, *_starts(problem)],
        [(heat, heat) for heat in heats],
        int(SHARE[problem.mode] * problem.budget.seconds * EFFORT * shorter) // len(heats),
        weights,
        progress,
    )


def _do_not_fit_together(problem: Problem) -> bool:
    """Whether the groups of some stage, which the device updates, cannot all be there at once."""
    together: dict[tuple[int, ...], int] = {}
    for group in problem.chain.parameters:
        if group.host_update_time is None and group.grad_bytes:
            size = group.bytes + group.grad_bytes + group.state_bytes
            together[group.stages] = together.get(group.stages, 0) + size
    return max(together.values(), default=0) > problem.limit


def sequence_of(problem: Problem, plan: np.ndarray, visits: int = VISITS) -> Sequence:
    """The sequence that `plan` stands for."""
    return to_sequence(placer(problem.chain, problem.limit, visits, problem.updates), plan)


def least(problem: Problem) -> Iterator[tuple[Sequence, str]]:
    """A plan for the smallest limits, where the search finds nothing, and its source."""
    smallest = remat.smallest_plan(problem.chain, problem.limit, problem.updates) if problem.mode != "offload" else None
    if smallest is not None:
        plan, visits = joined(smallest, at_home(problem.chain)), smallest.shape[1]
        if not placer(problem.chain, problem.limit, visits, problem.updates).judge(plan)[1]:
            yield sequence_of(problem, plan, visits), "remat-smallest"
    if problem.mode != "remat":
        everything = HostPlan((0,) * (len(problem.chain) + 1), (False,) * (len(problem.chain) + 1))
        away = host_plan(problem.chain, problem.limit, problem.updates) if problem.mode == "joint" else everything
        if away is not None:
            yield host_step(problem.chain, away, problem.updates), "host"


# -- where the search starts


def _starts(problem: Problem) -> list[np.ndarray]:
    """The best placements by rule, each under the plan for the activations that suits it best."""
    kernel = placer(problem.chain, problem.limit, VISITS, problem.updates, problem.host_limit)
    activations = [in_columns(codes, VISITS) for codes in _activations(problem)]

    def score(plan: np.ndarray) -> tuple[bool, float]:
        makespan, *over = kernel.judge(plan)
        return any(over), float(sum(over)) if any(over) else makespan

    placements = _placements(problem) if activations else ()
    plans = [min((joined(codes, genes) for codes in activations), key=score) for genes in placements]
    return sorted(plans, key=score)[:KEPT]


def _activations(problem: Problem) -> Iterator[np.ndarray]:
    """Plans for the activations alone that keep less and less on the device."""
    chain = problem.chain.without_parameters()
    everything = empty(chain)
    yield everything
    if problem.mode != "remat":
        moved = everything.copy()
        moved[1:] |= MOVE
        yield moved
    if problem.mode == "offload":
        return
    smallest_limit, most = min_mem_limit(chain, "remat"), simulate(chain, keep_all(chain)).peak_bytes
    slots = min(120, remat.sized(chain, TABLE_WORK, (len(chain),))[0])
    for share in (0.75, 0.5, 0.35, 0.2, 0.1, 0.04):
        _, codes = remat.solve_slots(
            chain, max(1, int(smallest_limit + share * (most - smallest_limit))), slots, "sums"
        )
        if codes is not None:
            yield codes
            if problem.mode == "joint":
                moved = codes.copy()
                moved[1:] |= MOVE
                yield moved
    for smallest in (
        remat.smallest_plan(chain, smallest_limit),
        remat.smallest_plan(problem.chain, problem.limit, problem.updates),
    ):
        if smallest is not None:
            yield smallest
    if problem.mode == "joint":
        yield from all_moving(chain, min_mem_limit(chain, "joint"))


def _placements(problem: Problem) -> Iterator[np.ndarray]:
    """Everything at home; 78 rules and more, of three kinds of groups, each a run of neighbours: r with all they have
    on the device, then z with their parameters there and their states on the host, then streamed ones; and two in which
    groups of the same stage are updated one by one, with no w, or nothing, of the others on the device.
    """
    chain, home = problem.chain, at_home(problem.chain)
    K, host = len(home), np.array([g.host_update_time is not None and g.grad_bytes > 0 for g in chain.parameters])
    yield home
    if problem.mode == "remat":
        return
    counts = sorted({round(K * n / 8) for n in range(9)})
    runs = [(r, z) for r in counts for z in counts if r + z <= K and r < K]
    # whether the device updates the streamed ones; whether groups are counted from the first stage on, or the last
    for here, step in product((False, True) if host.any() else (True,), (-1, 1)):
        for r, z in runs:
            if step > 0 and not r:
                continue
            order, genes = np.arange(K)[::step], home.copy()
            lent, streamed = order[r : r + z], order[r + z :]
            genes[lent, FLAGS] = np.where(host[lent], ON_HOST, STATE_LEAVES)
            genes[streamed, MASK] = EVERYWHERE
            genes[streamed, FLAGS] = np.where(~host[streamed] | here, STATE_LEAVES | GRADIENT_LEAVES, ON_HOST)
            yield genes
    for flags in (STATE_LEAVES | STEPS_ASIDE, STATE_LEAVES | GRADIENT_LEAVES | STEPS_ASIDE):
        genes = home.copy()
        genes[:, MASK], genes[:, FLAGS] = EVERYWHERE, np.where(host, ON_HOST, flags)
        yield genes
