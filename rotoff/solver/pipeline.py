"""Plans for all ranks of a pipeline, judged by `core.pipeline.simulate_pipeline`.

The chain of a whole model is cut into stages of nearly equal time. Each is planned for the micro-batches that the
schedule has in flight there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ..core.chain import Chain
from ..core.pipeline import Order, PipelineTrace, StagePlan, most_in_flight, simulate_pipeline, stage_plan
from ..core.sequence import Op
from ..core.simulator import simulate
from ..errors import InfeasibleError, OptionError
from .in_flight import least_in_flight, solve_in_flight, turn
from .plan_codes import keep_all

REFINE = 0.2  # effort of each stage's search
WORTH = 1.005  # step time / step time of keeping everything up to which no other plan of a shared link is tried
_TRIES = 6


def cut(chain: Chain, stages: int) -> tuple[Chain, ...]:
    """Cut `chain` into `stages` pieces such that the slowest piece is as fast as possible.

    Raises:
        OptionError: if the chain has fewer stages.
    """
    L = len(chain)
    if stages > L:
        raise OptionError(f"the model has {L} stages, and the pipeline {stages}; cut the model finer, by stages=")
    times = [stage.forward_time + stage.backward_time for stage in chain.stages]
    before = [math.fsum(times[:n]) for n in range(L + 1)]
    best = [(before[n], 0) if n else (math.inf, 0) for n in range(L + 1)]  # slowest piece of the first n, last cut
    cuts = [best]
    for piece in range(2, stages + 1):
        best = [
            min(((max(cuts[-1][m][0], before[n] - before[m]), m) for m in range(piece - 1, n)), default=(math.inf, 0))
            for n in range(L + 1)
        ]
        cuts.append(best)
    ends = [L]
    for row in reversed(cuts[1:]):
        ends.append(row[ends[-1]][1])
    return tuple(
        replace(
            chain,
            stages=chain.stages[a:b],
            input_bytes=chain.output_bytes(a),
            input_grad_bytes=chain.grad_bytes(a),
            parameters=(),
        )
        for a, b in pairwise([0, *reversed(ends)])
    )


@dataclass(frozen=True)
class Pipeline:
    """A pipeline to plan: the chain of each stage, the tasks of each rank, and how many ranks share a link to the host.

    beside: bytes that each micro-batch holds in a stage in addition to the chain's.
    """

    pieces: tuple[Chain, ...]
    order: tuple[Order, ...]
    ranks_per_link: int = 1
    beside: int = 0

    def of_rank(self, rank: int) -> list[int]:
        """The stages on a rank."""
        return sorted({task.stage for task in self.order[rank]})

    def least(self, rank: int) -> int:
        """The smallest limit of a rank at which each of its stages has a plan by itself."""
        many = most_in_flight(self.order[rank])
        return max(
            least_in_flight(self.pieces[s], "joint", many, self.beside) + self.beside for s in self.of_rank(rank)
        )

    def run(self, plans: Sequence[tuple[Op, ...]]) -> PipelineTrace:
        """Simulate the step in which each stage runs its plan."""
        rows = zip(self.pieces, plans, strict=True)
        stages = [self._stage(*row) for row in rows]
        return simulate_pipeline(stages, self.order, self.ranks_per_link)

    def keep_everything(self) -> PipelineTrace:
        """Simulate the step without limits."""
        return self.run([keep_all(piece).ops for piece in self.pieces])

    def _stage(self, piece: Chain, ops: tuple[Op, ...]) -> StagePlan:
        return stage_plan(piece, simulate(piece, ops), turn(ops, len(piece)), self.beside)

    def shared(self, piece: Chain) -> Chain:
        """The piece to plan with: the rank's share of the link's bandwidth, and no names."""
        slower = piece.link.divided(self.ranks_per_link)._asdict()
        return replace(piece, **slower, stages=tuple(replace(stage, name="") for stage in piece.stages))


class PlannedRanks(NamedTuple):
    """The plan of a pipeline. plans: the operations of each stage. trace: the simulated step."""

    plans: tuple[tuple[Op, ...], ...]
    trace: PipelineTrace


def plan_pipeline(pipeline: Pipeline, limits: Sequence[int], refine: bool | float = REFINE) -> PlannedRanks:
    """The fastest pipeline found in which each rank holds at most its limit, in bytes.

    Raises:
        InfeasibleError: if a rank has no plan; names the rank.
    """
    known: dict[tuple[Chain, int, int], tuple[Op, ...]] = {}
    found: list[PlannedRanks] = []
    # An equal part of a shared link may be too little to count on, since its ranks do not always copy at once.
    for among in dict.fromkeys((pipeline.ranks_per_link, 1)):
        plans: list[tuple[Op, ...]] = [()] * len(pipeline.pieces)
        for rank, limit in enumerate(limits):
            plans = _planned_rank(replace(pipeline, ranks_per_link=among), plans, rank, limit, refine, known)
        found.append(PlannedRanks(tuple(plans), pipeline.run(plans)))
        if found[-1].trace.makespan <= WORTH * pipeline.keep_everything().makespan:
            break
    return min(found, key=lambda one: one.trace.makespan)


def _planned_rank(
    pipeline: Pipeline,
    plans: list[tuple[Op, ...]],
    rank: int,
    limit: int,
    refine: bool | float,
    known: dict[tuple[Chain, int, int], tuple[Op, ...]],
) -> list[tuple[Op, ...]]:
    """`plans` with new ones for the stages of a rank, which share the limit."""
    many, beside, less = most_in_flight(pipeline.order[rank]), pipeline.beside, 0
    for _ in range(_TRIES):
        made = list(plans)
        for stage in pipeline.of_rank(rank):
            piece, left = pipeline.shared(pipeline.pieces[stage]), limit - beside - less
            if (key := (piece, many, left)) not in known:
                try:
                    known[key] = solve_in_flight(piece, max(1, left), many, beside, refine=refine).ops
                except InfeasibleError as error:
                    least = error.min_mem_limit + beside + less
                    told = (
                        f"rank {rank} of the pipeline needs at least {least} bytes with {many} micro-batches in flight"
                    )
                    raise InfeasibleError(f"{told}; the limit is {limit}", least) from None
            made[stage] = known[key]
        over = _held(pipeline, made, rank) - limit
        if over <= 0:
            return made
        less = max(less + over, 2 * less)
    raise InfeasibleError(f"no plans were found for the stages of rank {rank} within {limit} bytes", limit + over)


def _held(pipeline: Pipeline, plans: Sequence[tuple[Op, ...]], rank: int) -> int:
    """The most bytes that a rank holds; program order alone determines them."""
    stages = {s: pipeline._stage(pipeline.pieces[s], plans[s]) for s in pipeline.of_rank(rank)}
    held = most = 0
    for task in pipeline.order[rank]:
        stage = stages[task.stage]
        held -= stage.resting_bytes if task.backward else 0
        most = max(most, held + max(work.memory for work in (stage.backward if task.backward else stage.forward)))
        held += 0 if task.backward else stage.resting_bytes
    return most
