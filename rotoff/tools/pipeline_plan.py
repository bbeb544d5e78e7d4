"""`rotoff.plan` for a pipeline: the bytes of each rank and the time of a step, without the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..core.figures import overhead, percent, table
from ..core.modes import whole_number
from ..core.parameters import ParameterGroup
from ..core.pipeline import most_in_flight, orders
from ..core.sizes import format_bytes
from ..errors import LimitError, OptionError
from ..solver.pipeline import Pipeline, cut, plan_pipeline
from .question import Question


@dataclass(frozen=True)
class PlannedRank:
    """One rank of a pipeline.

    stages: names of its first and last stage. in_flight: most micro-batches in flight. resident_bytes: parameters,
    gradients and optimizer states. mem_limit: bytes that all its micro-batches may allocate; min_mem_limit: the
    smallest that works; keep_all_bytes: the peak of keeping everything. peak_bytes, host_bytes: the most held on device
    and host. idle_time: seconds in which it has nothing to do."""

    stages: tuple[str, str]
    in_flight: int
    resident_bytes: int
    mem_limit: int
    min_mem_limit: int
    keep_all_bytes: int
    peak_bytes: int
    host_bytes: int
    idle_time: float


@dataclass(frozen=True)
class PlannedPipeline:
    """A row for each rank; prints as a table.

    step_time: estimated seconds of one step of all micro-batches. keep_all_time: the same without limits. bubble: the
    share of the ranks' time in which they have nothing to do.
    """

    schedule: str
    micro_batches: int
    device: str
    step_time: float
    keep_all_time: float
    bubble: float
    rows: tuple[PlannedRank, ...]

    def __iter__(self) -> Iterator[PlannedRank]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fits(self) -> bool:
        """Always true: `rotoff.plan` raises InfeasibleError if a rank has no plan."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {"format": "rotoff.planned_pipeline", "version": 1, **asdict(self)}

    def __str__(self) -> str:
        over = percent(overhead(self.step_time, self.keep_all_time))
        lines = [
            f"{self.schedule}, {self.micro_batches} micro-batches on {len(self)} x {self.device} (times are estimates):"
            f" {self.step_time:.4g} s a step, {over} over keeping everything, {self.bubble:.1%} bubbles",
        ]
        head = "rank", "in flight", "resident", "limit", "peak", "keep all", "smallest", "host"
        ranks = []
        for n, row in enumerate(self.rows):
            sizes = (row.resident_bytes, row.mem_limit, row.peak_bytes, row.keep_all_bytes, row.min_mem_limit)
            ranks.append((str(n), str(row.in_flight), *map(format_bytes, (*sizes, row.host_bytes))))
        return "\n".join([*lines, *table(head, ranks, ())])


def planned_pipeline(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: dict[str, Any],
    question: Question,
    ranks: int,
    micro_batches: int,
    schedule: str,
    chunks: int,
    ranks_per_link: int,
) -> PlannedPipeline:
    """`rotoff.plan` for a pipeline.

    Raises:
        OptionError: for an invalid schedule or numbers that it does not support. LimitError, InfeasibleError: if the
            step of a rank does not fit; the message names the rank.
    """
    if question.settings is not None:
        raise OptionError("settings are compared on one device or a mesh; leave pipeline out")
    order = orders(schedule, ranks, micro_batches, chunks)
    whole_number(ranks_per_link, "ranks_per_link")
    args, named = tree_map(lambda leaf: _first(leaf, micro_batches), (sample, kwargs))
    device, usable, mem_limit = question.device, question.usable, question.mem_limit
    profile = question.estimated(model, args, named)
    chain = profile.chains[-1].charging_first_runs  # where nothing stays on the device past the next stage
    beside = chain.input_bytes - profile.batch_bytes
    chain = replace(chain, input_bytes=profile.batch_bytes)
    pipeline = Pipeline(cut(chain, ranks * chunks), order, ranks_per_link, beside=beside)
    resident = _resident(question.whole(profile).groups, pipeline)
    limits = [usable - nbytes if mem_limit is None else min(mem_limit, usable - nbytes) for nbytes in resident]
    for rank, limit in enumerate(limits):
        if limit <= 0:
            raise LimitError(
                f"rank {rank} has {format_bytes(resident[rank])} of parameters, gradients and optimizer states, and"
                f" {device.name} has {format_bytes(usable)} for training; take more ranks"
            )
    found, everything = plan_pipeline(pipeline, limits), pipeline.keep_everything()
    peaks = [rank.peak_bytes for rank in everything.ranks]
    rows = []
    for rank, trace in enumerate(found.trace.ranks):
        own = [stage.name for s in pipeline.of_rank(rank) for stage in pipeline.pieces[s].stages]
        known, least = (resident[rank], limits[rank]), pipeline.least(rank)
        held = least, peaks[rank], trace.peak_bytes, trace.host_peak_bytes
        rows.append(PlannedRank((own[0], own[-1]), most_in_flight(order[rank]), *known, *held, trace.idle_time))
    times = found.trace.makespan, everything.makespan, found.trace.bubble
    return PlannedPipeline(schedule, micro_batches, device.name, *times, tuple(rows))


def refuse_alone(**options: int) -> None:
    """Raise OptionError for options of a pipeline that are not 1."""
    for name, number in options.items():
        if number != 1:
            raise OptionError(f"{name}={number!r} is for a pipeline; give the number of its ranks as pipeline=, too")


def _first(leaf: Any, micro_batches: int) -> Any:
    """The first micro-batch of a tensor."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return leaf
    if leaf.shape[0] % micro_batches:
        raise OptionError(f"microbatches is {micro_batches}; it does not divide a batch of {leaf.shape[0]}")
    return leaf[: leaf.shape[0] // micro_batches]


def _resident(parameters: Sequence[ParameterGroup], pipeline: Pipeline) -> list[int]:
    """Bytes of parameters, gradients and states on each rank; groups read on several ranks count on each."""
    ends = list(accumulate(map(len, pipeline.pieces)))
    found = []
    for rank in range(len(pipeline.order)):
        own = {i for s in pipeline.of_rank(rank) for i in range(ends[s] - len(pipeline.pieces[s]) + 1, ends[s] + 1)}
        groups = [group for group in parameters if own.intersection(group.stages)]
        found.append(sum(group.bytes + group.grad_bytes + group.state_bytes for group in groups))
    return found
