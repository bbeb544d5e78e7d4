"""Plans a step on a tape within a limit: the solver proposes on the chain, the exact levels decide."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

from ..core.chain import Chain
from ..core.figures import Figures, percent
from ..core.sequence import FORWARDS, OpKind, Sequence
from ..core.simulator import Trace
from ..core.sizes import NO_LIMIT, format_bytes
from ..errors import InfeasibleError, InvalidSequenceError
from ..profile.tape_chain import TapeChain, charged
from ..profile.tape_groups import TapeGroups
from ..profile.tape_profile import TapeProfile
from ..report.expected_step import keep_all_step
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_sequence
from ..runtime.placed.placed_plan import PlacedPlan
from ..solver import keep_all
from ..solver.anneal import CLOSE, least_compute
from ..solver.bounds import SUM_ERROR, largest_operation, min_mem_limit, steady_bound
from ..solver.in_flight import least_in_flight, resting_bytes
from ..solver.search import parse_host_limit
from .request import Request

logger = logging.getLogger("rotoff")
ROUNDS = 12  # chains that are tried, each with more for the first runs that exceed the limit
FEW = 10  # slots of the dynamic program for the smallest limit, where seconds are of no interest
GOOD = 1.005  # step time / compute time up to which another size's plan is as good as one that a search finds
LARGE, SHORT = 400, 0.1  # stages beyond which a search of so many seconds takes the place of whole tables
SHORTEST = 0.02  # seconds of a search from which on it finds what whole tables do, in less time
EFFORT = 0.03  # search time / compute time of a step, if no plan is reused at once


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A plan for a step.

    Attributes:
        profile: of the step. found: the chain that was planned, with its contents; under a `device_limit` with groups
            of parameters.
        execution: what the step runs; `keeps_all` if it is the model as it is.
        levels: the most bytes that each operation holds, in the terms of the limit. peak: of the step, likewise.
    """

    profile: TapeProfile
    found: TapeChain | TapeGroups
    execution: ExecutionPlan
    levels: tuple[int, ...]
    peak: int

    @property
    def chain(self) -> Chain:
        return self.found.chain

    @property
    def tape_chain(self) -> TapeChain:
        """The chain with its contents."""
        return self.found.found if isinstance(self.found, TapeGroups) else self.found

    @property
    def sequence(self) -> Sequence:
        return self.execution.sequence

    @property
    def trace(self) -> Trace:
        return self.execution.trace

    @property
    def placed(self) -> PlacedPlan | None:
        """Where parameters lie; None if none is moved."""
        return self.execution.placed

    @property
    def keeps_all(self) -> bool:
        return self.execution.keeps_all

    @property
    def forward_peak(self) -> int:
        """The most bytes until the model's forward has ended, in the terms of the limit."""
        end = next(n for n, op in enumerate(self.sequence) if op.kind in FORWARDS and op.stage == len(self.chain))
        return max(self.levels[: end + 1])

    @property
    def resting(self) -> int:
        """Bytes that the step holds between forward and backward, if several are under way."""
        if self.execution.keeps_all:
            return self.profile.keep_all_bytes(2) - self.profile.keep_all_bytes()
        return resting_bytes(self.chain, self.sequence.ops) + self.profile.beside_resting

    def figures(self, limit: int | None) -> Figures:
        """The figures of the step under a `mem_limit`, which does not count the batch, or a `device_limit`, which does.
        The peak of the model as it is is that of a loop which sets gradients to None; `keep_all_bytes` is the smallest
        limit at which it runs so."""
        plan, placed = self.execution, self.placed
        return Figures(
            None if limit is None or limit >= NO_LIMIT else limit,
            self.peak,
            plan.in_flight * plan.host_bytes + (0 if placed is None else placed.host_bytes),
            plan.trace.makespan,
            keep_all_step(self.chain).makespan,
            self.found.whole if isinstance(self.found, TapeGroups) else self.profile.keep_all_bytes(plan.in_flight),
            with_batch=isinstance(self.found, TapeGroups),
        )


def make_plan(
    profile: TapeProfile, request: Request, near: Iterable[Sequence] = (), room: int | None = None
) -> StepPlan:
    """Return the fastest plan that was found for a request.

    Args:
        near: of the same step at other sizes; one that is good enough is taken, so that a new size needs no search.
        room: bytes of the host that there are, if that is known.

    Raises:
        InfeasibleError: if nothing fits.
    """
    began = time.perf_counter()
    if request.plain and request.policy is None and profile.keep_all_bytes(request.in_flight) <= request.mem_limit:
        plan = keeping_all(profile, request.in_flight)
    else:
        plan = _reused(profile, request, tuple(near), room) or _searched(profile, request, room)
    report(request, plan, time.perf_counter() - began)
    return plan


def keeping_all(profile: TapeProfile, in_flight: int = 1) -> StepPlan:
    """Return the plan to run the model as it is."""
    found, peak = profile.chains[0], profile.keep_all_bytes(in_flight)
    sequence = keep_all(found.chain)
    execution = replace(compile_sequence(found.chain, sequence, in_flight=in_flight), keeps_all=True)
    levels = (min(level - profile.batch_bytes, peak) for level in found.levels(sequence))
    return StepPlan(profile, found, execution, tuple(levels), peak)


def compiled(profile: TapeProfile, found: TapeChain, sequence: Sequence, in_flight: int = 1) -> StepPlan:
    """Return the plan that runs `sequence` of the chain `found`.

    Raises:
        InvalidSequenceError: if the machine refuses it.
    """
    resting = resting_bytes(found.chain, sequence.ops) + profile.beside_resting if in_flight > 1 else 0
    others = (in_flight - 1) * resting - profile.batch_bytes
    levels = tuple(level + others for level in found.levels(sequence))
    execution = compile_sequence(found.chain, sequence, in_flight=in_flight)
    charged = replace(sequence, mem_limit=max(sequence.mem_limit or 0, execution.trace.peak_bytes))
    return StepPlan(profile, found, replace(execution, sequence=charged), levels, max(levels))


def least_limit(profile: TapeProfile, request: Request) -> int:
    """Return the smallest limit that a request can have, whatever its own is."""
    options = {name: value for name, value in request.options.items() if name != "host_limit"}
    own = request.policy is not None
    quick = replace(request, mem_limit=1, mem_slots=FEW, options=options if own else {**options, "refine": False})
    parts = (request.mode,) if own else _parts(request.mode)
    plans = (p for part in parts for found in profile.chains for p in _proposed(profile, found, quick, part))
    least = min((plan.peak for plan in plans), default=None)
    if least is None:  # the policy has no plan
        return least_limit(profile, replace(request, policy=None, options={}))
    return max(1, min(profile.keep_all_bytes(request.in_flight), least) if request.plain and not own else least)


def least_time(profile: TapeProfile, request: Request, found: float = math.inf) -> float:
    """Return seconds that no step within the request's limit can beat. found: seconds of a plan.

    Raises:
        InfeasibleError: if nothing fits.
    """
    if profile.keep_all_bytes() <= request.mem_limit:
        return profile.chain.compute_time
    limit = request.mem_limit + profile.batch_bytes
    fitting = [one.chain for one in profile.chains if limit >= min_mem_limit(one.chain, "joint")]
    if not fitting and found < math.inf:  # it holds less than the chain charges
        return profile.chain.compute_time * (1 - SUM_ERROR)
    if not fitting:
        raise _infeasible(profile, replace(request, mode="joint"))
    alone = min(map(least_compute, fitting))
    if found <= CLOSE * alone:
        return alone * (1 - SUM_ERROR)
    return min(steady_bound(chain, limit, "during") for chain in fitting)


def _parts(mode: str) -> tuple[str, ...]:
    """The modes whose sequences `mode` allows. The chain's least sequence in joint may hold more than one of these."""
    return ("joint", "remat", "offload") if mode == "joint" else (mode,)


def _searched(profile: TapeProfile, request: Request, room: int | None) -> StepPlan:
    """Return the fastest plan that the solver finds."""
    plan = _best(profile, request)
    if plan is not None and room is not None and request.in_flight * plan.execution.host_bytes > room:
        asked = request.options.get("host_limit")
        most = room if asked is None else min(room, parse_host_limit(asked))
        needs = request.in_flight * plan.execution.host_bytes
        if request.policy is None:  # the slab is larger than the host limit by gaps between values
            for share in (1.0, 0.75, 0.5, 0.0):
                plan = _best(profile, replace(request, options={**request.options, "host_limit": int(share * most)}))
                if plan is None or request.in_flight * plan.execution.host_bytes <= room:
                    break
        if plan is None or request.in_flight * plan.execution.host_bytes > room:
            raise _no_room(profile, request, needs, room)
    if plan is None:
        raise _infeasible(profile, request)
    return plan


def _best(profile: TapeProfile, request: Request) -> StepPlan | None:
    """Return the fastest plan within the limit. Near the smallest limit of the chain, short searches find plans that
    hold less than it charges."""
    tries = [(request.mode, request, profile.chains)]
    if (quick := _quick(request)) != request and len(profile.chains) > 1:  # in the chain with the fastest plan of it
        first = _fastest(profile, request, [(request.mode, quick, profile.chains)])
        tries[0] = (request.mode, request, profile.chains if first is None else [first.tape_chain])
    if request.policy is None:
        least = replace(request, mem_limit=1, options={**request.options, "refine": False})
        several = (least, replace(least, mem_slots=FEW))  # the second as for `least_limit`
        tries += [(part, one, profile.chains) for one in several for part in _parts(request.mode)]
    return _fastest(profile, request, tries)


def _fastest(
    profile: TapeProfile, request: Request, tries: Iterable[tuple[str, Request, list[TapeChain]]]
) -> StepPlan | None:
    """Return the fastest plan within the request's limit of the first of `tries` that has one."""
    for part, asked, chains in tries:
        plans = (plan for found in chains for plan in _proposed(profile, found, asked, part))
        fitting = [plan for plan in plans if plan.peak <= request.mem_limit]
        if fitting:
            return min(fitting, key=lambda plan: plan.trace.makespan)
    return None


def _quick(request: Request) -> Request:
    """`request` without a search, unless that is short."""
    effort = request.options.get("refine", True)
    if request.policy is not None or (effort is not True and SHORTEST <= effort <= SHORT):
        return request
    return replace(request, options={**request.options, "refine": False})


def _proposed(profile: TapeProfile, found: TapeChain, request: Request, mode: str) -> Iterator[StepPlan]:
    """Plans for the request's limit, or for the smallest that the chain has. Where the first run of a stage exceeds it,
    the next is for a chain that charges the stage with more; where bytes are left, for a larger limit. The last one is
    searched for."""
    chain, limit = found.chain, request.mem_limit + profile.batch_bytes
    request, asked, raised = replace(request, mode=mode), limit, False
    quick = _quick(request)
    searches = quick != request
    if request.policy is None and len(chain) > LARGE:
        quick = replace(quick, options={**quick.options, "refine": SHORT})
    for n in range(ROUNDS):
        if request.policy is None:
            asked = max(asked, least_in_flight(chain, mode, request.in_flight, profile.beside_resting))
        try:
            sequence = quick.solve(chain, asked, profile.beside_resting)
            plan = compiled(profile, found, sequence, request.in_flight)
        except InfeasibleError as error:
            if request.policy is None or n or error.min_mem_limit <= asked:
                return
            asked = error.min_mem_limit  # the chain charges more than the step may hold
            continue
        except InvalidSequenceError:
            return
        yield plan
        if over := first_runs_over(plan.sequence, plan.levels, max(limit, asked) - profile.batch_bytes):
            chain = charging(chain, over)
        elif plan.peak < request.mem_limit and not raised and asked < 2 * limit:
            asked, raised = asked + request.mem_limit - plan.peak, True
        elif searches and quick is not request and n < ROUNDS - 1:
            quick = request
        else:
            return


def first_runs_over(sequence: Sequence, levels: Several[int], limit: int) -> dict[int, int]:
    """Return by how much the first runs of stages, and the loss after the last one, exceed a limit."""
    ran, over = 0, dict[int, int]()
    for op, level in zip(sequence, levels, strict=True):
        first = op.kind in FORWARDS and op.stage > ran
        ran = op.stage if first else ran
        if level > limit and (first or (op.kind is OpKind.B and op.stage == ran)):
            over[op.stage] = max(level - limit, limit // 64)
    return over


def charging(chain: Chain, more: dict[int, int]) -> Chain:
    """Return `chain` with `more` bytes for forwards of these stages."""
    stages = (
        charged(stage, [more.get(i, 0)] * (len(stage.forms) + 2)) for i, stage in enumerate(chain.stages, start=1)
    )
    return replace(chain, stages=tuple(stages))


def _reused(profile: TapeProfile, request: Request, near: Several[Sequence], room: int | None) -> StepPlan | None:
    """Return the fastest of the plans `near` that fits this size, or what a short search finds if that is faster."""
    if not near or request.policy is not None:
        return None
    best: StepPlan | None = None
    for sequence in near:
        for found in profile.chains:
            try:
                plan = compiled(profile, found, replace(sequence, mem_limit=None, meta={}), request.in_flight)
            except (InvalidSequenceError, IndexError, StopIteration):
                continue
            fits = plan.peak <= request.mem_limit and (room is None or plan.execution.host_bytes <= room)
            if fits and (best is None or plan.trace.makespan < best.trace.makespan):
                best = plan
    if best is not None and best.trace.makespan <= GOOD * profile.chain.compute_time:
        return best
    effort = {"refine": EFFORT * profile.chain.compute_time, **request.options}
    quick = _best(profile, replace(request, options=effort))
    if quick is not None and room is not None and quick.execution.host_bytes > room:
        quick = None
    fitting = [one for one in (best, quick) if one is not None]
    return min(fitting, key=lambda one: one.trace.makespan, default=None)


def _infeasible(profile: TapeProfile, request: Request) -> InfeasibleError:
    least = least_limit(profile, request)
    needs = f"the training step needs at least {format_bytes(least)} ({least} bytes)"
    limit = f"{format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
    if least <= request.mem_limit:
        if (host := request.options.get("host_limit")) is None:
            return InfeasibleError(f"nothing was found {request} within {limit}; {needs}", least)
        found = f"nothing was found {request} within {limit} on the device and host_limit={host!r}"
        return InfeasibleError(f"{found}; without a host_limit {needs}, so give a larger host_limit", least)
    phase, stage, nbytes = largest_operation(profile.chain)
    binds = ""
    if nbytes - profile.batch_bytes >= least:
        name = profile.chain.stage(stage).name
        binds = f". The {phase} of stage {stage} ({name}) alone needs that much"
    return InfeasibleError(f"{needs} {request}; the limit is {limit}{binds}", least)


def _no_room(profile: TapeProfile, request: Request, needed: int, room: int) -> InfeasibleError:
    least = least_limit(profile, replace(request, mode="remat"))
    return InfeasibleError(
        f"the training step {request} within {format_bytes(request.mem_limit)} ({request.mem_limit} bytes) keeps"
        f" {needed} bytes in pinned host memory, and {room} are available; give a limit of at least"
        f" {format_bytes(least)} ({least} bytes), which needs none, give the process more memory, or say in the"
        " environment that there is more (ROTOFF_HOST_MEMORY)",
        least,
    )


def report(request: Request, plan: StepPlan, seconds: float) -> None:
    """Log what a plan takes. seconds: that it took to make it."""
    if not logger.isEnabledFor(logging.INFO):
        return
    figures, trace, groups = plan.figures(request.mem_limit), plan.trace, plan.found
    everything, asked = figures.everything, figures.mem_limit
    limit = "there is no limit" if asked is None else f"the limit is {format_bytes(asked)}"
    if plan.keeps_all:
        logger.info("rotoff: keeping everything takes %s, and %s: the model runs as it is", everything, limit)
        return
    if isinstance(groups, TapeGroups):
        here = sum(name.startswith("w") for name in plan.sequence.resident)
        limit += f"; the parameters of {here} of {len(groups.placed)} groups lie on the device between steps"
    else:
        limit = f"the smallest limit {request} is {format_bytes(least_limit(plan.profile, request))}, and {limit}"
    logger.info("rotoff: keeping everything takes %s, %s", everything, limit)
    logger.info(
        "rotoff: planned %s in %.1f s, predicted peak %s, step %.4g s (%s over keeping everything), %s offloaded,"
        " %.4g s recomputed; %s",
        request,
        seconds,
        format_bytes(figures.peak_bytes),
        figures.step_time,
        percent(figures.overhead),
        format_bytes(trace.d2h_bytes),
        trace.recompute_time,
        in_words(plan.sequence),
    )
