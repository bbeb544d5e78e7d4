"""The lanes by another way: every instant at which anything begins or ends, forward in time, in exact fractions.

Compute is a process like the copies here, so that nothing is found backwards or ahead of time. Sequences are legal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from rotoff import Chain, Op, OpKind
from rotoff.core.sequence import COMPUTES, Value, a, abar, g, o, w

FORWARDS = (OpKind.F_ALL, OpKind.F_SEL, OpKind.F_CK, OpKind.F_NONE)


@dataclass
class _Job:
    """seconds: left, at full speed. waits: for another job before it begins."""

    lane: str
    value: Value
    seconds: Fraction
    number: int
    waits: _Job | None = None
    end: Fraction | None = None


@dataclass
class _Run:
    chain: Chain
    now: Fraction = Fraction(0)
    jobs: list[_Job] = field(default_factory=list)  # that have not ended, in issue order
    made: dict[Value, _Job] = field(default_factory=dict)  # of the host's copy
    form: dict[int, int] = field(default_factory=dict)
    issued: int = 0
    ran: set[int] = field(default_factory=set)  # stages, in this step

    def seconds(self, op: Op, following: Op | None) -> Fraction:
        """following: the next operation on the compute lane."""
        stage = self.chain.stage(op.stage) if op.kind in (*FORWARDS, OpKind.B) else None
        if op.kind is OpKind.U:
            return Fraction(self.chain.group(op.stage).update_time)
        if stage is None:
            return Fraction(0)
        if op.kind is OpKind.B:
            return Fraction(stage.form(self.form[op.stage]).backward_time)
        again, saves = op.stage in self.ran, op.kind in (OpKind.F_ALL, OpKind.F_SEL)
        self.ran.add(op.stage)
        if saves:
            self.form[op.stage] = op.form
        early = again and saves and following == Op(OpKind.B, op.stage)
        return Fraction(stage.forward_time) - (Fraction(stage.tail_time) if early else 0)

    def issue(self, op: Op, size: int) -> _Job:
        k = op.stage
        if op.kind is OpKind.H:
            job = _Job("host", g(k), Fraction(self.chain.group(k).host_update_time), self.issued, self.made[g(k)])
            self.made[w(k)] = self.made[o(k)] = job
        elif op.kind is OpKind.OFFLOAD:
            job = _Job("out", op.value, size / Fraction(self.chain.d2h_bandwidth), self.issued)
            self.made[op.value] = job
        else:
            waits = self.made.get(op.value)
            job = _Job("in", op.value, size / Fraction(self.chain.h2d_bandwidth), self.issued, waits)
        self.issued += 1
        self.jobs.append(job)
        return job

    def running(self) -> dict[_Job | str, Fraction]:
        """The jobs that run now, and their speeds."""
        first: dict[str, _Job] = {}
        for job in self.jobs:
            lane = "out" if job.lane == "in" and not self.chain.duplex else job.lane
            first.setdefault(lane, job)
        active = {lane: job for lane, job in first.items() if job.waits is None or job.waits.end is not None}
        speeds = {"out": Fraction(1), "in": Fraction(1), "host": Fraction(1)}
        if "out" in active and "in" in active:
            chain = self.chain
            for lane, both, alone in (
                ("out", chain.d2h_bidirectional_bandwidth, chain.d2h_bandwidth),
                ("in", chain.h2d_bidirectional_bandwidth, chain.h2d_bandwidth),
            ):
                speeds[lane] = Fraction(both) / Fraction(alone) if both is not None else Fraction(1)
        return {id(job): speeds[lane] for lane, job in active.items()}

    def until(self, most: Fraction | None) -> None:
        """Go on to the next end of a job, or by `most` seconds where that is sooner."""
        speeds = self.running()
        by_id = {id(job): job for job in self.jobs}
        steps = [by_id[key].seconds / speed for key, speed in speeds.items()]
        step = min([*steps, *([] if most is None else [most])])
        self.now += step
        for key, speed in speeds.items():
            job = by_id[key]
            job.seconds -= step * speed
            if job.seconds == 0:
                job.end = self.now
                self.jobs.remove(job)

    def busy(self, values: Iterable[Value]) -> bool:
        wanted = set(values)
        return any(job.value in wanted and job.lane != "host" for job in self.jobs)


def _waits(op: Op) -> tuple[Value, ...]:
    if op.kind is OpKind.B:
        return abar(op.stage), a(op.stage), a(op.stage - 1)
    if op.kind is OpKind.F_NONE:
        return (a(op.stage - 1),)
    return (op.value,) if op.kind in (OpKind.FREE, OpKind.DROP, OpKind.WAIT) else ()


def ends(chain: Chain, ops: Iterable[Op], sizes: Iterable[int], periods: int = 1) -> tuple[float, list[float]]:
    """(seconds of the step, as the machine counts them; when each operation of the last period has ended, from its
    start). sizes: bytes that each operation copies."""
    run, marks, rows = _Run(chain), [Fraction(0)], []
    program = list(zip(ops, sizes, strict=True))
    for _ in range(periods):
        rows = []
        run.ran.clear()
        for n, (op, size) in enumerate(program):
            if op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH, OpKind.H):
                rows.append(run.issue(op, size))
                continue
            while op.kind is OpKind.U and run.busy((w(op.stage), g(op.stage), o(op.stage))):
                run.until(None)
            left = run.seconds(op, next((after for after, _ in program[n + 1 :] if after.kind in COMPUTES), None))
            end = run.now + left
            while run.now < end:
                run.until(end - run.now)
            computed = run.now if left else None
            while run.busy(_waits(op)):
                run.until(None)
            rows.append(run.now if computed is None else computed)
        marks.append(run.now)
    while run.jobs:
        run.until(None)
    found = [float((row.end if isinstance(row, _Job) else row) - marks[-2]) for row in rows]
    return float(marks[-1] if periods == 1 else (marks[-1] - marks[-3]) / 2), found
