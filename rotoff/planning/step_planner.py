"""Plans a step on a tape within a limit: the solver proposes on the chain, the exact levels decide."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple

from ..core.chain import Chain, LinkRates
from ..core.figures import Figures, percent
from ..core.sequence import FORWARDS, OpKind, Sequence
from ..core.simulator import Trace, simulate
from ..core.sizes import NO_LIMIT, format_bytes
from ..errors import InfeasibleError, InvalidSequenceError
from ..profile.tape_chain import TapeChain, charged
from ..profile.tape_groups import TapeGroups
from ..profile.tape_profile import TapeProfile
from ..report.expected_step import keep_all_step
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_sequence
from ..runtime.placed.placed_plan import PlacedPlan
from ..runtime.step_times import following_seconds
from ..solver import keep_all
from ..solver.anneal import CLOSE, least_compute
from ..solver.bounds import SUM_ERROR, largest_operation, min_mem_limit, steady_bound
from ..solver.in_flight import least_in_flight, resting_bytes
from ..solver.search import parse_host_limit
from .request import Request

logger = logging.getLogger("rotoff")
Way = TapeChain | TapeGroups
ROUNDS = 12  # proposals, each for a chain that charges more, or for other bytes
CHARGES = 10  # of them after which a chain may charge more
SEARCHES = 2  # proposals with the whole effort
FEW = 10  # slots of the dynamic program for the smallest limit, where seconds are of no interest
GOOD = 1.005  # step time / compute time up to which another size's plan is as good as one that a search finds
SHORT = 0.1  # seconds of the search with which a plan is looked for first
AMPLE = 1.25  # limit / bytes of the largest operation, from which on a search finds a plan, whatever the times are
LESS = 1.1  # smallest limit of a chain / bytes of a plan, up to which one of that chain may hold fewer
EFFORT = 0.1  # search time / compute time of a step, if training has begun


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

    @property
    def host_bytes(self) -> int:
        """The most bytes that the host holds for the steps in flight."""
        placed = 0 if self.placed is None else self.placed.host_bytes
        return self.execution.in_flight * self.execution.host_bytes + placed

    def figures(self, limit: int | None) -> Figures:
        """The figures of the step under a `mem_limit`, which does not count the batch, or a `device_limit`, which does.
        The peak of the model as it is is that of a loop which sets gradients to None; `keep_all_bytes` is the smallest
        limit at which it runs so. On a CPU the time counts what following the plan costs."""
        plan = self.execution
        followed = not plan.keeps_all and self.profile.device.type == "cpu"
        return Figures(
            None if limit is None or limit >= NO_LIMIT else limit,
            self.peak,
            self.host_bytes,
            plan.trace.makespan + (following_seconds(plan.trace, len(self.chain)) if followed else 0.0),
            keep_all_step(self.chain).makespan,
            self.found.whole if isinstance(self.found, TapeGroups) else self.profile.keep_all_bytes(plan.in_flight),
            with_batch=isinstance(self.found, TapeGroups),
        )


def make_plan(
    profile: TapeProfile,
    request: Request,
    near: Several[StepPlan] = (),
    room: int | None = None,
    ways: Several[Way] = (),
) -> StepPlan:
    """Return the fastest plan that was found for a request.

    Args:
        near: of the same step at other sizes; one that is good enough is taken, so that a new size needs no search, and
            moves no parameters.
        room: bytes of the host that there are, if that is known.
        ways: chains of the step with groups of its parameters, for a `device_limit`.

    Raises:
        InfeasibleError: if nothing fits; `min_mem_limit` is the smallest limit for which a plan was found.
    """
    began, ways = time.perf_counter(), ways or profile.chains
    if request.plain and request.policy is None and _whole(profile, request, ways) <= request.mem_limit:
        plan = keeping_all(profile, request.in_flight, ways[0])
    else:
        plan = _reused(profile, request, near, room, ways) or _searched(profile, request, room, ways)
    report(request, plan, time.perf_counter() - began)
    return plan


def _whole(profile: TapeProfile, request: Request, ways: Several[Way]) -> int:
    """The bytes of the model as it is, in the terms of the limit."""
    return ways[0].whole if isinstance(ways[0], TapeGroups) else profile.keep_all_bytes(request.in_flight)


def keeping_all(profile: TapeProfile, in_flight: int = 1, found: Way | None = None) -> StepPlan:
    """Return the plan to run the model as it is."""
    found = found or profile.chains[0]
    sequence = keep_all(found.chain, "after")
    execution = replace(compile_sequence(found.chain, sequence, in_flight), keeps_all=True)
    peak = found.expected if isinstance(found, TapeGroups) else profile.keep_all_bytes(in_flight)
    levels = (min(level, peak) for level in found.levels(sequence))
    return StepPlan(profile, found, execution, tuple(levels), peak)


def compiled(
    profile: TapeProfile, found: Way, sequence: Sequence, request: Request, levels: Several[int] | None = None
) -> StepPlan:
    """Return the plan that runs `sequence` of the chain `found`, which has these `levels`, if they are known.

    Raises:
        InvalidSequenceError: if the machine refuses it.
    """
    during, chain, resting = request.updates == "during", found.chain, 0
    trace = simulate(chain, sequence, updates=request.updates)
    placed = found.placement(sequence, during, request.mem_limit) if isinstance(found, TapeGroups) else None
    if request.in_flight > 1:
        resting = (request.in_flight - 1) * (resting_bytes(chain, sequence.ops) + profile.beside_resting)
    if levels is None:
        levels = [level + resting for level in found.levels(sequence, during)]
    charged = replace(sequence, mem_limit=max(sequence.mem_limit or 0, trace.peak_bytes))
    execution = compile_sequence(chain, charged, request.in_flight, trace, placed)
    return StepPlan(profile, found, execution, tuple(levels), max(levels))


def least_limit(profile: TapeProfile, request: Request, ways: Several[Way] = ()) -> int:
    """Return the smallest limit that a request can have, whatever its own is."""
    ways = ways or profile.chains
    options = {name: value for name, value in request.options.items() if name != "host_limit"}
    request = replace(request, options=options)
    least = profile.least.get(_asked(request, ways))
    if least is None:
        least = min((plan.peak for plan in _smallest(profile, request, ways)), default=None)
    if least is None:  # the policy has no plan
        return least_limit(profile, replace(request, policy=None, options={}), ways)
    return max(1, min(_whole(profile, request, ways), least) if request.plain and request.policy is None else least)


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
        raise _infeasible(profile, replace(request, mode="joint"), profile.chains)
    alone = min(map(least_compute, fitting))
    if found <= CLOSE * alone:
        return alone * (1 - SUM_ERROR)
    return min(steady_bound(chain, limit, "during") for chain in fitting)


def _searched(profile: TapeProfile, request: Request, room: int | None, ways: Several[Way]) -> StepPlan:
    """Return the fastest plan that the solver finds."""
    plan = _best(profile, request, ways)
    if plan is not None and room is not None and (needs := plan.host_bytes) > room:
        asked = request.options.get("host_limit")
        most = room if asked is None else min(room, parse_host_limit(asked))
        for share in (1.0, 0.75, 0.5, 0.0) if request.policy is None else ():  # there are gaps between values
            limited = replace(request, options={**request.options, "host_limit": int(share * most)})
            plan = _best(profile, limited, ways)
            if plan is None or plan.host_bytes <= room:
                break
        if plan is None or plan.host_bytes > room:
            raise _no_room(profile, request, needs, room, ways)
    if plan is None:
        raise _infeasible(profile, request, ways)
    return plan


def _best(profile: TapeProfile, request: Request, ways: Several[Way]) -> StepPlan | None:
    """Return the fastest plan within the limit. Near the smallest limit of the chain, plans are looked for without
    regard to times first, so that what is feasible depends on bytes alone."""
    limit, policy = request.mem_limit, request.policy is not None
    fitting = (plan for plan in _smallest(profile, request, ways) if plan.peak <= limit)
    tight = limit < min(AMPLE * _floor(profile, one.chain, request) + one.beside for one in ways)
    known = profile.least.get(_asked(request, ways), 0)
    small = next(fitting, None) if tight and not policy and known <= limit else None
    if tight and not policy and small is None:
        return None
    quick = _quick(request)
    start = _raced(profile, ways, quick)
    if start is None:
        return small or (None if policy else next(fitting, None))
    found = [start.plan] if small is None else [start.plan, small]
    if quick != request and _seconds(start.plan) > CLOSE * least_compute(start.found.chain):
        longer = islice(_proposed(profile, start.found, request, start.chain, start.asked), SEARCHES)
        found += islice((one.plan for one in longer if one.plan.peak <= limit), 1)
    return min(found, key=_seconds)


def _seconds(plan: StepPlan) -> float:
    return plan.trace.makespan


def _raced(profile: TapeProfile, ways: Several[Way], request: Request) -> Proposal | None:
    """Return a proposal within the request's limit. Only the way with the fastest proposal so far is pursued, since
    what makes a plan smaller makes it slower."""
    rounds = [_proposed(profile, found, request) for found in ways]
    latest = {n: one for n, proposals in enumerate(rounds) if (one := next(proposals, None)) is not None}
    while latest:
        n = min(latest, key=lambda n: _seconds(latest[n].plan))
        if latest[n].plan.peak <= request.mem_limit:
            several = (latest[n], next(rounds[n], latest[n]))  # the second one in the bytes that are left
            fitting = [one for one in several if one.plan.peak <= request.mem_limit]
            return min(fitting, key=lambda one: _seconds(one.plan))
        if (one := next(rounds[n], None)) is None:
            del latest[n]
        else:
            latest[n] = one
    return None


def _quick(request: Request) -> Request:
    """`request` with a short search, unless its own is."""
    effort = request.options.get("refine", True)
    if request.policy is not None or (effort is not True and effort <= SHORT):
        return request
    return replace(request, options={**request.options, "refine": SHORT})


def _floor(profile: TapeProfile, chain: Chain, request: Request) -> int:
    """The smallest limit in the terms of the chain."""
    if request.in_flight > 1:
        return least_in_flight(chain, request.mode, request.in_flight, profile.beside_resting)
    return min_mem_limit(chain, request.mode, request.updates)


class Proposal(NamedTuple):
    """A plan, which was found for `asked` bytes of `chain`: that of `found`, or one that charges some stages with
    more."""

    plan: StepPlan
    found: Way
    chain: Chain
    asked: int


def _proposed(
    profile: TapeProfile, found: Way, request: Request, chain: Chain | None = None, asked: int = 0
) -> Iterator[Proposal]:
    """Propose plans for the request's limit, or for the smallest that the chain has. Where the first run of a stage
    exceeds it, the next is for a chain that charges the stage with more; elsewhere, and where that has not helped, for
    fewer bytes; where bytes are left, once for more. chain, asked: with which to begin."""
    limit, more = request.mem_limit, True
    chain, asked = found.chain if chain is None else chain, asked or limit - found.beside
    resting = profile.beside_resting if request.in_flight > 1 else 0
    for n in range(ROUNDS):
        if request.policy is None:
            asked = max(asked, _floor(profile, chain, request))
        try:
            sequence = request.solve(chain, asked, resting)
            plan = compiled(profile, found, sequence, request)
        except InfeasibleError as error:
            if request.policy is None or n or error.min_mem_limit <= asked:
                return
            asked = error.min_mem_limit  # the chain charges more than the step may hold
            continue
        except InvalidSequenceError:
            return
        yield Proposal(plan, found, chain, asked)
        over = first_runs_over(plan.sequence, plan.levels, max(limit, asked + found.beside)) if n < CHARGES else {}
        if over:
            chain = charging(chain, over)
        elif asked > _floor(profile, chain, request) if plan.peak > limit else more and plan.peak < limit:
            asked, more = asked + limit - plan.peak, False
        else:
            return


def _smallest(profile: TapeProfile, request: Request, ways: Several[Way]) -> Iterator[StepPlan]:
    """Plans that hold few bytes, of chains whose times nobody has measured."""
    if request.policy is not None:
        for found in ways:
            yield from (one.plan for one in _proposed(profile, found, replace(request, mem_limit=1)))
        return
    parts = ("joint", "remat", "offload") if request.mode == "joint" else (request.mode,)
    whens = ("after", "during")[: 1 + (request.updates == "during")]
    tried: list[tuple[int, int, Request, Way, Way]] = []
    for when, part, found in product(whens, parts, ways):
        options = {**request.options, "refine": False} | ({"updates": when} if request.placed else {})
        quick = replace(request, mem_limit=1, mode=part, mem_slots=FEW, options=options)
        even = replace(found, chain=_evenly_timed(found.chain))
        tried.append((_floor(profile, even.chain, quick) + found.beside, len(tried), quick, even, found))
    least = NO_LIMIT
    for floor, _, quick, even, found in sorted(tried, key=lambda one: one[:2]):
        for one in _proposed(profile, even, quick) if floor < LESS * least else ():
            levels = one.plan.levels if quick.updates == request.updates else None
            plan = compiled(profile, found, one.plan.sequence, request, levels)
            least = min(least, plan.peak)
            yield plan
    if least < NO_LIMIT:
        profile.least[_asked(request, ways)] = least


def _asked(request: Request, ways: Several[Way]) -> tuple[object, ...]:
    """What the plans of `_smallest` depend on, beside the profile."""
    how = request.mode, request.policy, request.updates, request.placed, request.in_flight
    host = request.options.get("host_limit")
    costs = (isinstance(one, TapeGroups) and (one.update, one.on_host, one.coming) for one in ways)
    return (*how, host, *costs, *((_evenly_timed(one.chain), one.beside) for one in ways))


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


def _reused(
    profile: TapeProfile, request: Request, near: Several[StepPlan], room: int | None, ways: Several[Way]
) -> StepPlan | None:
    """Return the fastest of the plans `near` that fits this size, or what a short search finds if that is faster; with
    groups of parameters, no search moves them if one fits."""
    if not near or request.policy is not None:
        return None
    fitting: list[StepPlan] = []
    for other, found in product(near, ways):
        with suppress(InvalidSequenceError, IndexError, StopIteration):
            plan = compiled(profile, found, replace(other.sequence, mem_limit=None, meta={}), request)
            if plan.peak <= request.mem_limit and (room is None or plan.host_bytes <= room):
                fitting.append(plan)
    enough = math.inf if request.placed else GOOD * profile.chain.compute_time
    best = min(fitting, key=_seconds, default=None)
    if best is not None and _seconds(best) <= enough:
        return best
    effort = {"refine": EFFORT * profile.chain.compute_time, **request.options}
    quick = _best(profile, replace(request, options=effort), ways)
    if quick is not None and (room is None or quick.host_bytes <= room):
        fitting.append(quick)
    return min(fitting, key=_seconds, default=None)


def _infeasible(profile: TapeProfile, request: Request, ways: Several[Way]) -> InfeasibleError:
    least = least_limit(profile, request, ways)
    whole = " with its parameters, gradients and optimizer states" if request.placed else ""
    needs = f"the training step{whole} needs at least {format_bytes(least)} ({least} bytes)"
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
    kind = "device_limit" if request.placed else "limit"
    return InfeasibleError(f"{needs} {request}; the {kind} is {limit}{binds}", least)


def _no_room(profile: TapeProfile, request: Request, needed: int, room: int, ways: Several[Way]) -> InfeasibleError:
    least = least_limit(profile, replace(request, mode="remat"), ways)
    return InfeasibleError(
        f"the training step {request} within {format_bytes(request.mem_limit)} ({request.mem_limit} bytes) keeps"
        f" {needed} bytes in pinned host memory, and {room} are available; give a limit of at least"
        f" {format_bytes(least)} ({least} bytes), which needs none, give the process more memory, or say in the"
        " environment that there is more (ROTOFF_HOST_MEMORY)",
        least,
    )


def _evenly_timed(chain: Chain) -> Chain:
    """`chain` with times that nobody has measured, so that what fits depends on bytes alone: a backward takes twice as
    long as a forward; an update, and the copy of all parameters, or of what all stages save, as long as a forward."""
    stages = [
        replace(
            stage,
            forward_time=1.0,
            backward_time=2.0,
            tail_time=0.0,
            forms=tuple(replace(form, backward_time=3.0) for form in stage.forms),
        )
        for stage in chain.stages
    ]
    groups = [
        replace(group, update_time=1.0, host_update_time=None if group.host_update_time is None else 1.0)
        for group in chain.parameters
    ]
    nbytes = sum(group.bytes for group in groups) or sum(stage.saved_bytes for stage in stages)
    rate = float(max(1, nbytes))
    rates = LinkRates(rate, rate, chain.duplex)._asdict()
    return replace(chain, **rates, stages=tuple(stages), parameters=tuple(groups))


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
