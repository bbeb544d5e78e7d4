"""A pipeline of ranks: the order of each schedule, and a simulator of the plans that its stages run.

A pipeline cuts a model into stages, and a batch into micro-batches. Each rank runs the forwards and backwards of its
stages in the order of a schedule, and waits for its neighbours' outputs and gradients. The simulator runs every
operation of every micro-batch on the lanes of the machine (`core.simulator`): one compute lane for each rank, and two
lanes to the host, which some ranks may share. So copies of one micro-batch overlap with the work of the next. Stages,
ranks and micro-batches count from 0.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..errors import OptionError
from .chain import Chain
from .lanes import Lanes
from .modes import whole_number
from .sequence import COMPUTES, OpKind, Value, awaited
from .simulator import Machine
from .trace import Trace

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved1f1b": "Interleaved1F1B"}


class Task(NamedTuple):
    """The forward, or the backward, of one micro-batch in one stage; as text ``2F0`` or ``2B0``."""

    stage: int
    backward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{'B' if self.backward else 'F'}{self.micro_batch}"


Order = tuple[Task, ...]


def orders(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[Order, ...]:
    """The tasks of each rank, in the order of ``torch.distributed.pipelining``.

    Args:
        schedule: "GPipe", "1F1B" or "Interleaved1F1B". chunks: stages of each rank; stage s is on rank s mod `ranks`.

    Raises:
        OptionError: for another schedule, or numbers that the schedule does not support.
    """
    kind = schedule.lower().removeprefix("schedule") if isinstance(schedule, str) else ""
    if kind not in SCHEDULES:
        raise OptionError(f"schedule is {schedule!r}; it is one of {', '.join(SCHEDULES.values())}")
    for name, number in (("pipeline", ranks), ("microbatches", micro_batches), ("chunks", chunks)):
        whole_number(number, name)
    if chunks > 1 and kind != "interleaved1f1b":
        raise OptionError(f"chunks is {chunks}; {SCHEDULES[kind]} has one stage on each rank")
    if kind == "gpipe":
        return tuple(
            tuple(Task(rank, backward, n) for backward in (False, True) for n in range(micro_batches))
            for rank in range(ranks)
        )
    if kind == "1f1b" and micro_batches < ranks:
        raise OptionError(f"microbatches is {micro_batches}; 1F1B needs at least one for each of {ranks} ranks")
    rounds = max(1, micro_batches // ranks)
    if kind != "1f1b" and micro_batches % rounds:
        raise OptionError(f"microbatches is {micro_batches}; with {ranks} ranks give a multiple of {rounds}")
    return tuple(_one_f_one_b(kind, rank, ranks, micro_batches, chunks) for rank in range(ranks))


def _one_f_one_b(kind: str, rank: int, ranks: int, micro_batches: int, chunks: int) -> Order:
    of_a_round = micro_batches // max(1, micro_batches // ranks)
    hops, every = ranks - 1 - rank, micro_batches * chunks
    warm = hops if kind == "1f1b" else (chunks - 1) * of_a_round + 2 * hops
    done: dict[tuple[int, bool], int] = {}

    def task(step: int, backward: bool) -> Task:
        local = step // of_a_round % chunks if kind != "1f1b" else 0
        stage = (chunks - 1 - local if backward else local) * ranks + rank
        done[stage, backward] = n = done.get((stage, backward), -1) + 1
        return Task(stage, backward, n)

    found: list[Task] = []
    for step in range(every + min(warm, every)):
        if step < every:
            found.append(task(step, False))
        if step >= min(warm, every):
            found.append(task(step - min(warm, every), True))
    return tuple(found)


def most_in_flight(order: Sequence[Task]) -> int:
    """The most micro-batches, over all stages of a rank, whose forward has run and whose backward has not."""
    return max(accumulate((-1 if task.backward else 1 for task in order), initial=0))


class _Work(NamedTuple):
    """One operation: seconds of compute, the values whose copies it waits for, and the copy that it starts."""

    seconds: float
    waits: tuple[Value, ...]
    lane: str
    value: Value
    copy_time: float
    memory: int
    host: int


@dataclass(frozen=True)
class StagePlan:
    """The operations of one stage for each micro-batch; `stage_plan` makes one.

    forward, backward: operations. resting_bytes, resting_host_bytes: held between the two, on device and host.
    """

    chain: Chain
    forward: tuple[_Work, ...]
    backward: tuple[_Work, ...]
    resting_bytes: int
    resting_host_bytes: int


def stage_plan(chain: Chain, trace: Trace, turn: int, beside: int = 0) -> StagePlan:
    """A stage that runs a plan.

    Args:
        chain: the stage's costs. trace: the plan's trace. turn: how many of its operations the forward runs. beside:
            bytes that each micro-batch holds in addition to the chain's.
    """
    machine, work, resting, host = Machine(chain), [], 0, 0
    for n, event in enumerate(trace.events):
        op = event.op
        seconds = event.end - event.start if op.kind in COMPUTES else 0.0
        lane = event.lane if op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH) else ""
        value = Value(op.saved, op.stage)
        bandwidth = chain.d2h_bandwidth if lane == "d2h" else chain.h2d_bandwidth
        machine.step(op)  # for the bytes alone
        copied = machine.device.get(value, 0) / bandwidth if lane else 0.0
        memory = event.memory + beside
        work.append(_Work(seconds, awaited(op), lane, value, copied, memory, event.host_memory))
        if n + 1 == turn:
            resting, host = machine.held_bytes - chain.grad_bytes(len(chain)) + beside, machine.host_bytes
    return StagePlan(chain, tuple(work[:turn]), tuple(work[turn:]), resting, host)


class RankTrace(NamedTuple):
    """compute_time, copy_time: seconds in which the rank computes, and waits for copies. idle_time: seconds in which it
    has nothing to do, the bubble. peak_bytes, host_peak_bytes: the most bytes held."""

    compute_time: float
    copy_time: float
    idle_time: float
    peak_bytes: int
    host_peak_bytes: int


class PipelineTrace(NamedTuple):
    """makespan: seconds of one step of the pipeline. ranks: one row for each."""

    makespan: float
    ranks: tuple[RankTrace, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they have nothing to do."""
        idle = math.fsum(rank.idle_time for rank in self.ranks)
        return idle / (self.makespan * len(self.ranks)) if self.makespan else 0.0


def simulate_pipeline(
    stages: Sequence[StagePlan], order: Sequence[Sequence[Task]], ranks_per_link: int = 1
) -> PipelineTrace:
    """Run one step of a pipeline. Sending from rank to rank takes no time.

    Args:
        stages: all stages of the pipeline. order: the tasks of each rank, such as `orders` returns.
        ranks_per_link: neighbours whose copies to the host share one link, each copy at the link's full rate. A copy
            for which a rank already waits is not slowed down by later copies in the other direction.

    Raises:
        OptionError: for an order in which ranks wait for each other forever, and for `ranks_per_link` below 1.
    """
    whole_number(ranks_per_link, "ranks_per_link")
    return _Run(stages, order, ranks_per_link).finish()


class _Run:
    """One step: the rank that is first in time runs its next operation, until all have run."""

    def __init__(self, stages: Sequence[StagePlan], order: Sequence[Sequence[Task]], ranks_per_link: int) -> None:
        self._stages, self._order, self._per_link = stages, order, ranks_per_link
        many = range(len(order))
        self._clock, self._busy, self._copying = ([0.0] * len(order) for _ in range(3))
        self._lanes: dict[int, Lanes] = {}
        self._copies: dict[tuple[int, int, Value], int] = {}
        self._out: dict[tuple[int, int, Value], int] = {}
        self._arrival: dict[Task, float] = {}
        self._parked: dict[Task, int] = {}
        self._held, self._host, self._peak, self._host_peak = ([0] * len(order) for _ in range(4))
        self._programs = [self._program(rank) for rank in many]
        self._heap = [(0.0, rank) for rank in many]

    def finish(self) -> PipelineTrace:
        while self._heap:
            _, rank = heapq.heappop(self._heap)
            due = next(self._programs[rank], None)
            if isinstance(due, Task):
                self._parked[due] = rank
            elif due is not None:
                heapq.heappush(self._heap, (due, rank))
        if self._parked:
            raise OptionError(f"the order of the pipeline cannot run: {next(iter(self._parked))} waits forever")
        end = max(self._clock, default=0.0)
        rows = zip(self._busy, self._copying, self._peak, self._host_peak, strict=True)
        return PipelineTrace(end, tuple(RankTrace(b, c, end - b - c, peak, host) for b, c, peak, host in rows))

    def _program(self, rank: int) -> Iterator[float | Task]:
        """Runs the rank's operations one by one. Yields when the next one may run, or the task that waits for a
        neighbour's tensors."""
        for task in self._order[rank]:
            if task.stage != (len(self._stages) - 1 if task.backward else 0):
                if task not in self._arrival:
                    yield task
                if self._arrival[task] > self._clock[rank]:
                    self._clock[rank] = self._arrival[task]
                    yield self._clock[rank]
            stage = self._stages[task.stage]
            if task.backward:
                self._held[rank] -= stage.resting_bytes
                self._host[rank] -= stage.resting_host_bytes
            for n, work in enumerate(stage.backward if task.backward else stage.forward):
                if n:
                    yield self._clock[rank]
                self._operate(rank, task, work)
            self._ended(task, rank)
            yield self._clock[rank]

    def _operate(self, rank: int, task: Task, work: _Work) -> None:
        end = self._clock[rank] + work.seconds
        chain, link = self._stages[task.stage].chain, rank // self._per_link
        lanes = self._lanes.setdefault(link, Lanes(chain.duplex, chain.bidirectional_shares))
        keys = [(task.stage, task.micro_batch, v) for v in work.waits]
        free = max([end, *(lanes.end(self._copies.get(key)) for key in keys)])
        self._busy[rank] += work.seconds
        self._copying[rank] += free - end
        self._clock[rank] = free
        if work.lane:
            key = task.stage, task.micro_batch, work.value
            after = self._out.get(key) if work.lane == "h2d" else None
            self._copies[key] = lanes.issue(work.lane, free, work.copy_time, after)
            if work.lane == "d2h":
                self._out[key] = self._copies[key]
        self._peak[rank] = max(self._peak[rank], self._held[rank] + work.memory)
        self._host_peak[rank] = max(self._host_peak[rank], self._host[rank] + work.host)

    def _ended(self, task: Task, rank: int) -> None:
        stage = self._stages[task.stage]
        if not task.backward:
            self._held[rank] += stage.resting_bytes
            self._host[rank] += stage.resting_host_bytes
        following = Task(task.stage + (-1 if task.backward else 1), task.backward, task.micro_batch)
        self._arrival[following] = self._clock[rank]
        if (waiting := self._parked.pop(following, None)) is not None:
            self._clock[waiting] = max(self._clock[waiting], self._arrival[following])
            heapq.heappush(self._heap, (self._clock[waiting], waiting))
