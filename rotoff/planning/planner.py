"""From a measured model and what the user asked for to a plan: the limit in the user's terms, and in the machine's."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..core.chain import Chain
from ..core.sequence import Op, OpKind, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..core.trace import figures
from ..errors import InfeasibleError, InvalidSequenceError
from ..profile.memory.skips import choices
from ..profile.profile import Profile
from ..report.rotor_names import NO_LIMIT
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_sequence, slab_bytes
from ..runtime.links.pinned import room_for_plan
from ..solver import keep_all
from ..solver.anneal import Budget
from ..solver.bounds import largest_operation, least_time_of, min_mem_limit
from ..solver.in_flight import least_in_flight
from ..solver.search import parse_host_limit
from .distributed import agree_on_limit, agree_on_sequence
from .memory_account import expected_bytes, reported_bytes, simulated_bytes
from .request import Request

logger = logging.getLogger("rotoff")
GOOD = 1.005  # times the seconds of compute: a plan of other sizes that is taken as it is
EFFORT = 0.1  # of a step's seconds, for the search where none is
SHORT = 0.1  # of the effort: what each way gets, before the best ones get all of it
WORTH = 1.005  # times the seconds of the best way: others that get all of it too
KEPT = "kept_skips"  # in a sequence's meta: numbers of the profile's skip connections that its chain leaves out
PLAIN = "plain_model"  # likewise: whether it is the plain model that runs
COMPACT = "compact_gradients"  # likewise: whether it is the chain whose waiting gradients are copied


@dataclass(frozen=True)
class PlanVariant:
    """One thing to solve for a request: `request` on `chain`, with `more` bytes added to the user's limit.

    kept: the profile's skip connections that stay in place, which `chain` leaves out. compact: whether gradients that
    wait are copied. forms: of each stage, the identities of its smaller forms.
    """

    kept: tuple[int, ...]
    compact: bool
    chain: Chain
    request: Request
    more: int
    forms: tuple[tuple[Any, ...], ...] = ()

    @property
    def least(self) -> int:
        """The smallest limit that works, in the user's terms."""
        return self.least_in(self.request.mode)

    def least_in(self, mode: str) -> int:
        return least_in_flight(self.chain, mode, self.request.in_flight, -self.more) - self.more

    def solve(self, asked: int) -> Sequence:
        """A sequence within the user's limit `asked`."""
        return self.request.solve(self.chain, asked + self.more, -self.more)

    def with_host_limit(self, nbytes: int) -> PlanVariant:
        """The same where no more than `nbytes`, nor than the user asked for, wait on the host."""
        options = self.request.options
        if (asked := options.get("host_limit")) is not None:
            nbytes = min(nbytes, parse_host_limit(asked))
        return replace(self, request=replace(self.request, options={**options, "host_limit": nbytes}))

    def shortened(self) -> PlanVariant:
        """The same with a share of the effort."""
        effort = SHORT * Budget.of(self.request.options.get("refine", True)).seconds
        if self.request.policy is not None or not effort:
            return self
        return replace(self, request=replace(self.request, options={**self.request.options, "refine": effort}))


Known = tuple[Profile, ExecutionPlan]


def make_plan(
    profile: Profile, request: Request, group: Any = None, near: Iterable[Known] = (), thorough: bool = True
) -> ExecutionPlan:
    """Plan under what is left of the user's limit once constants are taken off and the batch is added.

    group: of processes that follow one plan, which the first of them makes, or None. near: plans of the same stages at
    other sizes. One of them is taken where it is good enough, so that a new size costs little more than a look at
    these. thorough: whether to search at length where neither these nor a short search hold.

    Raises:
        InfeasibleError: where nothing fits, in the terms of the user's limit.
    """
    if request.planner is not None:
        return request.planner(profile, request)
    began = time.perf_counter()
    room = _room(profile, group) if request.here else None

    def decide() -> Sequence:
        return _decide(profile, request, room, tuple(near), thorough)

    sequence = decide() if group is None else agree_on_sequence(decide, group)
    kept, compact = _choice(sequence)
    chosen = profile.keeping(kept, compact)
    if not sequence.meta.get(PLAIN):
        chosen = chosen.with_upkeep()
    plan = compile_sequence(chosen.chain, sequence, sequence.mem_limit, kept, compact, request.in_flight)
    plan = replace(plan, keeps_all=bool(sequence.meta.get(PLAIN)), lets_go=request.lets_go)
    _report(profile, request, plan, time.perf_counter() - began)
    return plan


def _decide(profile: Profile, request: Request, room: int | None, near: tuple[Known, ...], thorough: bool) -> Sequence:
    """All that `make_plan` decides, as a sequence and its meta. room: host bytes that there are for it; None: enough.

    Raises:
        InfeasibleError: where nothing fits, in the terms of the user's limit.
    """
    everything = _everything(profile, request)
    if request.policy is None and reported_bytes(profile, everything) <= request.mem_limit:
        return _meant(everything.sequence, {KEPT: list(everything.kept), PLAIN: everything.keeps_all})
    ways = _ways(profile, request)
    try:
        if request.mem_limit < profile.prefix_peak_bytes:
            raise InfeasibleError("", min(way.least for way in ways))
        quick = near and request.policy is None and request.in_flight == 1
        found = _quickly(profile, request, ways, near, room) if quick else None
        if found is None and not thorough and request.in_flight == 1:
            raise InfeasibleError("a short search found nothing", min(way.least for way in ways))
        return _best_within(room, profile, request, ways) if found is None else found
    except InfeasibleError as error:
        if str(error):  # of the host's memory, which says all
            raise
        least = max(error.min_mem_limit, profile.prefix_peak_bytes)
        least = least_limit(profile, request) if request.policy is None else least
        raise _infeasible(profile, request, least, ways) from None


def _quickly(
    profile: Profile, request: Request, ways: list[PlanVariant], near: tuple[Known, ...], room: int | None
) -> Sequence | None:
    """One of the plans `near`, or what a short search finds beside it; None where neither holds within the limit."""
    reused = _reused(request.mem_limit, ways, near, room)
    kept, compact = near[0][1].kept, near[0][1].compact
    if reused is not None:
        seconds, sequence = reused
        if seconds <= GOOD * profile.chain.compute_time:
            return sequence
        kept, compact = _choice(sequence)
    effort = {"refine": EFFORT * profile.chain.compute_time, **request.options}
    quick = [replace(way, request=replace(way.request, options=effort)) for way in ways]
    quick.sort(key=lambda way: (way.kept, way.compact) != (kept, compact))
    found = None
    for way in quick if reused is None else quick[:1]:  # the first that holds is enough
        try:
            found = _best_within(room, profile, replace(request, options=effort), [way])
            break
        except InfeasibleError:
            continue
    if found is None or (reused is not None and reused[0] <= _seconds(found, quick)):
        return None if reused is None else reused[1]
    return found


def _reused(
    asked: int, ways: list[PlanVariant], near: tuple[Known, ...], room: int | None
) -> tuple[float, Sequence] | None:
    """The fastest of the plans `near` that holds here, too, and its seconds."""
    best: tuple[float, Sequence] | None = None
    for (profile, plan), way in product(near, ways):
        if (plan.kept, plan.compact) != (way.kept, way.compact) or asked + way.more <= 0:
            continue
        ops = _in_forms_of(plan.sequence.ops, profile, way)
        if ops is None:
            continue
        sequence = replace(plan.sequence, ops=ops, mem_limit=asked + way.more)
        try:
            trace = simulate(way.chain, sequence, sequence.mem_limit)
        except InvalidSequenceError:
            continue
        if (room is None or trace.host_peak_bytes <= room) and (best is None or trace.makespan < best[0]):
            sequence = replace(sequence, meta=figures(trace))
            best = trace.makespan, _meant(sequence, {KEPT: list(way.kept), COMPACT: way.compact})
    return best


def _in_forms_of(ops: tuple[Op, ...], profile: Profile, way: PlanVariant) -> tuple[Op, ...] | None:
    """`ops`, made for `profile`, with the numbers that their forms have in `way`; None where it lacks one."""
    if len(profile.chain) != len(way.chain):
        return None
    found = []
    for op in ops:
        if op.kind is OpKind.F_SEL:
            identity = profile.behaviours[op.stage - 1].forms[op.form - 1].identity
            if identity not in way.forms[op.stage - 1]:
                return None
            op = replace(op, form=1 + way.forms[op.stage - 1].index(identity))
        found.append(op)
    return tuple(found)


def _seconds(sequence: Sequence, ways: list[PlanVariant]) -> float:
    """What the step is expected to take by `sequence`, which was found for one of `ways`."""
    way = next(way for way in ways if (way.kept, way.compact) == _choice(sequence))
    return simulate(way.chain, sequence).makespan


def _choice(sequence: Sequence) -> tuple[tuple[int, ...], bool]:
    """The skip connections that `sequence` keeps in place, and whether it copies gradients."""
    return tuple(sequence.meta.get(KEPT, ())), bool(sequence.meta.get(COMPACT))


def _meant(sequence: Sequence, said: dict[str, Any]) -> Sequence:
    """`sequence` with what is `said` of it, where that is anything, in its meta."""
    return replace(sequence, meta={**sequence.meta, **{name: value for name, value in said.items() if value}})


def plan_everything(profile: Profile, plain: bool = True, lets_go: bool = False, in_flight: int = 1) -> ExecutionPlan:
    """The plan that keeps everything, by the account that charges least for it. plain: whether it is the plain model
    that runs. lets_go, in_flight: as of `Request`."""
    chains = {kept: profile.keeping(kept).chain for kept in choices(profile.skips)}
    plans = [  # which replay nothing
        compile_sequence(chain, keep_all(chain), kept=kept, in_flight=in_flight) for kept, chain in chains.items()
    ]
    return replace(min(plans, key=lambda plan: simulated_bytes(profile, plan)), keeps_all=plain, lets_go=lets_go)


def _everything(profile: Profile, request: Request) -> ExecutionPlan:
    return plan_everything(profile, request.plain, request.lets_go, request.in_flight)


def least_limit(profile: Profile, request: Request) -> int:
    """The smallest limit, in the user's terms, that `make_plan` can keep in the request's mode."""
    least = min(way.least for way in _ways(profile, request))
    if request.policy is None:
        least = min(least, reported_bytes(profile, _everything(profile, request)))
    return max(least, profile.prefix_peak_bytes, 1)


def least_time(profile: Profile, request: Request) -> float:
    """Seconds that no step within the request's limit can beat.

    Raises:
        InfeasibleError: where nothing fits.
    """
    ways = _ways(profile, replace(request, mode="joint"))
    limits: dict[Chain, int] = {}  # for one micro-batch, which has no more than that of several
    for way in ways:
        limits[way.chain] = max(limits.get(way.chain, 0), request.mem_limit + way.more)
    everything = _everything(profile, request)
    if reported_bytes(profile, everything) <= request.mem_limit:  # the plain model, without what the runtime takes
        return everything.trace.makespan
    fitting = [chain for chain, limit in limits.items() if limit >= min_mem_limit(chain, "joint")]
    if not fitting:
        raise _infeasible(profile, request, min(way.least for way in ways), ways)
    return min(least_time_of(chain, limits[chain]) for chain in fitting)


def _ways(profile: Profile, request: Request) -> list[PlanVariant]:
    """What to solve. Skip connections are carried, or some of them kept in place; gradients that wait lie where they
    were made, or are copied, which comes last, since it takes time. A policy of the papers knows carrying only.

    Snapshots for replays come off the limit, unless nothing is replayed: so joint is also asked for offload alone, or
    it would be behind that mode by these bytes.
    """
    ways = []
    forms = tuple(tuple(recipe.identity for recipe in behaviour.forms) for behaviour in profile.behaviours)
    choice = [(kept, compact) for compact in (False, True) for kept in choices(profile.skips)]
    for kept, compact in choice if request.policy is None else [((), False)]:
        if compact and profile.compact is None:
            continue
        chosen = profile.keeping(kept, compact).with_upkeep()
        offset = chosen.resident_input_bytes - chosen.unmanaged_bytes - chosen.snapshot_bytes
        more = offset - chosen.replay_bytes if request.replays else offset
        way = PlanVariant(kept, compact, chosen.chain, request, more, forms)
        ways.append(way)
        if request.policy is None and request.mode == "joint" and chosen.replay_bytes:
            ways.append(replace(way, request=replace(request, mode="offload"), more=offset))
    return ways


def _best(asked: int, ways: list[PlanVariant]) -> Sequence:
    """The fastest sequence of all ways; its meta says which skip connections it keeps in place, and whether it copies
    gradients. A short search of each way tells which of them are worth the whole effort.

    Raises:
        InfeasibleError: where none fits; `min_mem_limit` is in the user's terms.
    """
    found: list[tuple[float, int, Sequence]] = []
    short = [way.shortened() for way in ways]
    if len(ways) > 1 and short != ways:
        found, _ = _solved(asked, short)
    near = [n for seconds, n, _ in found if seconds <= WORTH * min(one[0] for one in found)] or range(len(ways))
    longer, least = _solved(asked, [ways[n] for n in near])
    found += [(seconds, near[n], sequence) for seconds, n, sequence in longer]
    if not found:
        raise InfeasibleError("", min(least))
    _, n, sequence = min(found, key=lambda one: one[0])
    return _meant(sequence, {KEPT: list(ways[n].kept), COMPACT: ways[n].compact})


def _solved(asked: int, ways: list[PlanVariant]) -> tuple[list[tuple[float, int, Sequence]], list[int]]:
    """Of each way that fits: the seconds expected of a step, its place among `ways`, its sequence. Of others: the
    smallest limit, in the user's terms."""
    found, least = [], []
    fastest = math.inf
    for n, way in enumerate(ways):
        if fastest <= way.chain.compute_time:
            break
        try:
            if asked + way.more <= 0:
                raise InfeasibleError("", way.least + way.more)
            sequence = way.solve(asked)
        except InfeasibleError as error:
            least.append(error.min_mem_limit - way.more)
            continue
        seconds = simulate(way.chain, sequence).makespan
        found.append((seconds, n, sequence))
        fastest = min(fastest, seconds)
    return found, least


def _room(profile: Profile, group: Any) -> int | None:
    """Host bytes that every process of the group has for its plan; None where nothing is known of any."""

    def room_here() -> int:
        room = room_for_plan(profile.device)
        return NO_LIMIT if room is None else room

    least = room_here() if group is None else agree_on_limit(room_here, group)
    return None if least >= NO_LIMIT else least


def _best_within(room: int | None, profile: Profile, request: Request, ways: list[PlanVariant]) -> Sequence:
    """`_best`, and where its slab of host memory is above `room` bytes, the best with a host limit.

    A search with the limit from the start would have another result, and another key in the cache, each time that a
    little more or less of the host is free.

    Raises:
        InfeasibleError: as `_best`, or in a sentence of its own where the room does not suffice.
    """
    found = first = _best(request.mem_limit, ways)
    limit = room
    while room is not None and limit is not None and (needed := request.in_flight * _slab_bytes(profile, found)) > room:
        if found is not first:  # values lie beside each other with gaps
            limit = max(0, limit - (needed - room))
        try:
            if request.policy is not None:
                raise InfeasibleError("", 0)
            found = _best(request.mem_limit, [way.with_host_limit(limit) for way in ways])
        except InfeasibleError:
            needed = request.in_flight * _slab_bytes(profile, first)
            raise _no_room(profile, request, ways, needed, room) from None
    return found


def _slab_bytes(profile: Profile, sequence: Sequence) -> int:
    return slab_bytes(profile.keeping(*_choice(sequence)).chain, sequence)


def _no_room(profile: Profile, request: Request, ways: list[PlanVariant], needed: int, room: int) -> InfeasibleError:
    without = [way.least_in("remat") for way in ways if way.request.mode != "offload"]
    least = min([reported_bytes(profile, _everything(profile, request)), *without])
    least = max(least, profile.prefix_peak_bytes)
    return InfeasibleError(
        f"the training step {request} within {format_bytes(request.mem_limit)} ({request.mem_limit} bytes) keeps"
        f" {needed} bytes in pinned host memory, and {room} are available; give a limit of at least"
        f" {format_bytes(least)} ({least} bytes), which needs none, give the process more memory, or say in the"
        " environment that there is more (ROTOFF_HOST_MEMORY)",
        least,
    )


def _infeasible(profile: Profile, request: Request, least: int, ways: list[PlanVariant]) -> InfeasibleError:
    needs = f"the training step needs at least {format_bytes(least)} ({least} bytes)"
    limit = f"{format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
    if least <= request.mem_limit and (host := request.options.get("host_limit")) is not None:
        found = f"nothing was found {request} within {limit} on the device and host_limit={host!r}"
        return InfeasibleError(f"{found}; without a host_limit {needs}, so give a larger one", least)
    return InfeasibleError(f"{needs} {request}; the limit is {limit}{_binding(profile, least, ways)}", least)


def _binding(profile: Profile, least: int, ways: list[PlanVariant]) -> str:
    """Which operation cannot do with less than `least`, where it is a single one."""
    for way in ways:
        phase, stage, nbytes = largest_operation(way.chain)
        if nbytes - way.more == least:
            binds = f". What binds is the {phase} of stage {stage}, {way.chain.stage(stage).name!r}, by itself"
            if stage < len(way.chain) or not profile.beside_loss_bytes:
                return binds
            return (
                f"{binds}, {format_bytes(profile.beside_loss_bytes)} of it for gradients of what is returned beside the"
                " loss; if no"
                ' backward starts there, name the output where it does: Checkpointable(model, backward_from="loss")'
            )
    return ""


def _report(profile: Profile, request: Request, plan: ExecutionPlan, seconds: float) -> None:
    trace, base = plan.trace, profile.chain.compute_time
    if not profile.timed:
        held = format_bytes(expected_bytes(profile, plan))
        logger.info("rotoff: planned %s, predicted peak %s: everything is kept, so no stage is timed", request, held)
        return
    logger.info(
        "rotoff: planned %s in %.1f s, limit %s, predicted peak %s, step %.4g s (%+.1f %% over keeping everything), %s"
        " offloaded, %.4g s recomputed; %s%s",
        request,
        seconds,
        "none" if request.mem_limit >= NO_LIMIT else format_bytes(request.mem_limit),
        format_bytes(expected_bytes(profile, plan)),
        trace.makespan,
        round(100 * (trace.makespan / base - 1), 1) + 0.0 if base else 0.0,  # never -0.0
        format_bytes(trace.d2h_bytes),
        trace.recompute_time,
        in_words(plan.sequence),
        f"; {len(plan.kept)} skip connections stay on the device ({format_bytes(profile.kept_bytes(plan.kept))})"
        if plan.kept
        else "",
    )
