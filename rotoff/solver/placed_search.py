"""The search for chains with parameters: placements by rule, under several plans for the activations, then annealing.

A plan is one row of numbers that the kernel `kernels.plan` decodes into a steady step. First come the codes of the
stages (`solver.plan_codes`); here the MOVE bit means that the value is offloaded during its longest absence. Then four
numbers follow for each group: a mask of the uses after which ``w`` leaves, flags (its state leaves; its gradient leaves
before an update on the device; the host updates it; ``w`` and ``g`` leave even while groups of the same stage are
updated; so do values of stages), the stage after whose B the update is issued, and a rank among updates issued there.

Every move of the search decodes a whole step in compiled code. As in `solver.anneal`, effort is counted in plans and
random numbers are seeded, so equal inputs give equal sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np

from ..core.chain import Chain
from ..core.sequence import Sequence
from ..core.simulator import simulate
from . import remat
from .anneal import THREADS, Problem, Progress, annealed
from .arrays import arrays, update_moments
from .bounds import host_plan, min_mem_limit
from .kernels.plan import Evaluator
from .plan_codes import APART, EARLY, empty, in_columns, keep_all, moved, to_ops, with_residents

GENES, SLOTS = 4, 4
MASK, FLAGS, AT, RANK = range(GENES)
EVERYWHERE = (1 << 13) - 1  # every bit of a mask
STATE_LEAVES, GRADIENT_LEAVES, ON_HOST, STEPS_ASIDE, ALONE = 1, 2, 4, 8, 16
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

# Bytes and seconds of a group, as `kernels.cycle` reads them.
GROUP = np.dtype(
    [(name, np.int64) for name in ("w", "g", "o", "transient")]
    + [("update", np.float64), ("host", np.float64), ("first", np.int32), ("last", np.int32)]
)


@lru_cache(maxsize=8)
def group_arrays(chain: Chain) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The groups of `chain` as rows of `GROUP`, and the groups that each stage reads: (first index of each stage, group
    of each index, place of the stage among the group's stages).
    """
    reads = sorted(
        (stage, k, min(slot, SLOTS - 1))
        for k, group in enumerate(chain.parameters)
        for slot, stage in enumerate(sorted(group.stages))
    )
    starts = np.searchsorted([stage for stage, _, _ in reads], np.arange(len(chain) + 2))
    rows = []
    for group in chain.parameters:
        sizes = group.bytes, group.grad_bytes, group.state_bytes, group.update_transient_bytes
        host = -1.0 if group.host_update_time is None else group.host_update_time
        rows.append((*sizes, group.update_time, host, min(group.stages), max(group.stages)))
    _, read, slots = np.array(reads, dtype=np.int32).T
    return np.array(rows, dtype=GROUP), (starts.astype(np.int32), read, slots)


def placer(chain: Chain, limit: int, visits: int, updates: str, host_limit: int | None = None) -> Evaluator:
    """A decoder for plans with `visits` columns of codes."""
    most = 16 * len(chain) + 64
    return Evaluator(chain, arrays(chain), limit, host_limit, visits, most, *group_arrays(chain), updates == "after")


def at_home(chain: Chain) -> np.ndarray:
    """Genes that keep every group on the device and update it there as soon as its gradient is whole."""
    genes = np.zeros((len(chain.parameters), GENES), dtype=np.int16)
    genes[:, AT] = [min(group.stages) for group in chain.parameters]
    return genes


def joined(codes: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """One plan of the stages' codes and the groups' genes."""
    return np.concatenate([codes.ravel(), genes.ravel()]).astype(np.int16)


def to_sequence(chain: Chain, kernel: Evaluator, plan: np.ndarray) -> Sequence:
    """Decode `plan` into a sequence."""
    return with_residents(chain, to_ops(kernel.text(plan)))


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


def sequence_of(problem: Problem, plan: np.ndarray) -> Sequence:
    """The sequence that `plan` stands for."""
    return to_sequence(problem.chain, placer(problem.chain, problem.limit, VISITS, problem.updates), plan)


def least(problem: Problem) -> Iterator[tuple[Sequence, str]]:
    """A plan for the smallest limits, where the search finds nothing, and its source."""
    chain, plans = problem.chain, dict[str, tuple[np.ndarray | None, np.ndarray]]()
    if problem.mode != "offload":
        plans["remat-smallest"] = remat.smallest_plan(chain, problem.limit, problem.updates), at_home(chain)
    if problem.mode != "remat":
        codes = host_plan(chain, problem.limit, problem.updates) if problem.mode == "joint" else moved(empty(chain))
        plans["host"] = codes, one_by_one(chain, problem.updates)
    for source, (codes, genes) in plans.items():
        if codes is not None:
            kernel, plan = placer(chain, problem.limit, codes.shape[1], problem.updates), joined(codes, genes)
            if not kernel.judge(plan)[1]:
                yield to_sequence(chain, kernel, plan), source


def one_by_one(chain: Chain, updates: str) -> np.ndarray:
    """Genes with which everything comes in for one operation at a time. The host updates the groups that it can, the
    device the others at the moments when it holds least (`update_moments`)."""
    genes = at_home(chain)
    genes[:, MASK] = EVERYWHERE
    genes[:, FLAGS] = np.where(on_host(chain), ON_HOST, STATE_LEAVES) | GRADIENT_LEAVES | STEPS_ASIDE | ALONE
    for k, stage in update_moments(chain, updates).items():
        genes[k - 1, AT] = stage
    return genes


def on_host(chain: Chain) -> np.ndarray:
    """Mask of the groups that the host can update."""
    return np.array([group.host_update_time is not None and group.grad_bytes > 0 for group in chain.parameters])


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
        yield moved(everything)
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
                yield moved(codes)
    for smallest in (
        remat.smallest_plan(chain, smallest_limit),
        remat.smallest_plan(problem.chain, problem.limit, problem.updates),
    ):
        if smallest is not None:
            yield smallest
    if problem.mode == "joint":
        yield from all_moving(chain, min_mem_limit(chain, "joint"))


def all_moving(chain: Chain, mem_limit: int) -> Iterator[np.ndarray]:
    """Plans in which every value may move, for limits at which some ā_i and ā_{i+1} do not fit together.

    For these i, B i+1 takes a_i and not ā_i. Other values move only to make room, so these plans are far faster than
    `host_plan`, and a search can start from them. The first plan makes a_i again in the backward phase if the forward
    fits beside ā_i; the second always makes it right after ā_i, and so fits more often.
    """
    plan = host_plan(chain, mem_limit)
    if plan is None:
        return
    c, form, after = arrays(chain), (plan[:, 0] >> 4) - 1, np.arange(2, len(chain) + 1)
    kept = c.out[0] + c.saved[after - 1, form[after - 1]]  # beside ā_i run F_all i+1 and B i+1
    forward, backward = kept + c.M_all[after, form[after]], kept + c.M_B[after, form[after]]
    tight = np.maximum(forward, backward) > mem_limit
    if not tight.any():
        return
    for late in (tight & (forward <= mem_limit), np.zeros_like(tight)):
        codes = plan & ~EARLY
        codes[1:-1][late] |= APART
        codes[1:-1][tight & ~late] |= EARLY
        yield codes


def _placements(problem: Problem) -> Iterator[np.ndarray]:
    """Everything at home; 78 rules and more, of three kinds of groups, each a run of neighbours: r with all they have
    on the device, then z with their parameters there and their states on the host, then streamed ones; and two in which
    groups of the same stage are updated one by one, with no w, or nothing, of the others on the device.
    """
    chain, home = problem.chain, at_home(problem.chain)
    K, host = len(home), on_host(chain)
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
