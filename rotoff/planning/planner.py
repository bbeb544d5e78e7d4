"""From a measured model and what the user asked for to a plan: the limit in the user's terms, and in the machine's."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from ..core.chain import Chain
from ..core.sequence import FORWARDS, Op, OpKind, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, InvalidSequenceError, OptionError, SequenceFormatError
from ..io.cache import Cache
from ..io.progress import Bar
from ..profile.memory.skips import choices
from ..profile.profile import Profile
from ..report.rotor_names import NO_LIMIT
from ..report.summary import in_words
from ..runtime.early_stop import tails_in_backward
from ..runtime.execution_plan import ExecutionPlan, compile_sequence, expected_step, slab_bytes
from ..runtime.form_replays import replay_forms
from ..runtime.links.pinned import room_for_plan
from ..runtime.overhead import Upkeep
from ..solver import keep_all, solve
from ..solver.bounds import largest_operation, least_time_of, min_mem_limit
from ..solver.in_flight import least_in_flight, needed_bytes, resting_bytes, solve_in_flight
from ..solver.policies import WITHOUT_RECOMPUTE, check_policy
from ..solver.search import parse_host_limit, parse_slots
from ..solver.solve import check_alone, check_mode_options
from ..version import __version__
from .distributed import agree_on_limit, agree_on_sequence
from .sharing import shared_bytes

logger = logging.getLogger("rotoff")
GOOD = 1.005  # times the seconds of compute: a plan of other sizes that is taken as it is
EFFORT = 0.1  # of a step's seconds, for the search where none is
UNPRICED = 0.01  # of a step: what tails may come to before the plan is asked for twice
KEPT = "kept_skips"  # in a sequence's meta: numbers of the profile's skip connections that its chain leaves out
PLAIN = "plain_model"  # likewise: whether it is the plain model that runs
COMPACT = "compact_gradients"  # likewise: whether it is the chain whose waiting gradients are copied


def check_options(mode: str, mem_slots: int, policy: str | None, options: dict[str, Any]) -> None:
    """Raise OptionError where these are no options of a request."""
    if mode not in ("joint", "remat", "offload"):
        raise OptionError(f"mode is {mode!r}; it is one of joint, remat, offload")
    parse_slots(mem_slots)
    if policy is None:
        check_mode_options(options)
    else:
        check_alone(policy, {"mode": mode, "mem_slots": mem_slots})
        check_policy(policy, options)


@dataclass(frozen=True)
class Request:
    """What `compute_sequence` was asked for."""

    mem_limit: int
    mode: str
    mem_slots: int
    options: dict[str, Any]
    policy: str | None = None  # a system of the papers, instead of the mode
    plain: bool = True  # whether the plain model may run where everything fits
    lets_go: bool = False  # whether the loop holds nothing of what the model returns but where its backward starts
    here: bool = False  # whether the plan is to run on this host, whose memory it must fit then
    in_flight: int = 1  # micro-batches whose forwards run before the backward of the first
    cache: Cache = field(default_factory=lambda: Cache(None))
    planner: Callable[[Profile, Request], ExecutionPlan] | None = (
        None  # where the limit is of all that the device holds
    )

    def __str__(self) -> str:
        told = f"in mode {self.mode}" if self.policy is None else f"with policy {self.policy}"
        return told if self.in_flight == 1 else f"{told}, with {self.in_flight} micro-batches in flight"

    @property
    def replays(self) -> bool:
        """Whether forwards may run more than once."""
        return self.mode != "offload" if self.policy is None else self.policy not in WITHOUT_RECOMPUTE

    def solve(self, chain: Chain, limit: int, beside: int = 0) -> Sequence:
        """The sequence asked for, within `limit` bytes in the machine's terms. beside: as of `solve_in_flight`."""
        key = self._key(chain, limit, beside)
        if key is not None and (known := _known_sequence(self.cache, key, chain, limit)) is not None:
            return known
        sequence = self._solve(chain, limit, beside)
        if key is not None:
            self.cache.keep("plan", key, sequence.to_dict())
        return sequence

    def _key(self, chain: Chain, limit: int, beside: int) -> dict[str, Any] | None:
        """All that a sequence depends on; None where an option cannot be compared, such as a function."""

        content = {k: v for k, v in chain.to_dict().items() if k not in ("name", "meta")}
        asked = {
            "limit": limit,
            "mode": self.mode,
            "slots": self.mem_slots,
            "policy": self.policy,
            "options": self.options,
        }
        if self.in_flight > 1:
            asked |= {"in_flight": self.in_flight, "beside": beside}
        key = {"chain": content, "rotoff": __version__, **asked}
        try:
            json.dumps(key)
        except TypeError:
            return None
        return key

    def _solve(self, chain: Chain, limit: int, beside: int) -> Sequence:
        if self.policy is not None:
            return solve(chain, limit, policy=self.policy, **self.options)
        with Bar("planning") as bar:
            options = {"progress": lambda done, _: bar(done), **self.options}
            options |= {"mode": self.mode, "mem_slots": self.mem_slots}
            if self.in_flight > 1:
                return solve_in_flight(chain, limit, self.in_flight, beside, **options)
            return solve(chain, limit, **options)


def _known_sequence(cache: Cache, key: dict[str, Any], chain: Chain, limit: int) -> Sequence | None:
    """A sequence kept for `key`, if the machine accepts it."""
    found = cache.find("plan", key)
    if found is None:
        return None
    try:
        sequence = Sequence.from_dict(found)
        simulate(chain, sequence, limit)
        if needed_bytes(chain, sequence.ops, key.get("in_flight", 1), key.get("beside", 0)) > limit:
            return None
    except (SequenceFormatError, InvalidSequenceError) as error:
        logger.warning("rotoff: a cached plan is ignored: %s", error)
        return None
    logger.info("rotoff: plan from the cache in %s", cache.directory)
    return sequence


@dataclass(frozen=True)
class PlanVariant:
    """One thing to solve for a request: `request` on `chain`, with `more` bytes added to the user's limit.

    kept: the profile's skip connections that stay in place, which `chain` leaves out. compact: whether gradients that
    wait are copied. tail_times: of the profile. shifted: whether the solver sees them in the backward. upkeep: of the
    profile. forms: of each stage, the identities of its smaller forms.
    """

    kept: tuple[int, ...]
    compact: bool
    chain: Chain
    request: Request
    more: int
    tail_times: tuple[float, ...] = ()
    shifted: bool = False
    upkeep: Upkeep | None = None
    forms: tuple[tuple[Any, ...], ...] = ()

    @property
    def least(self) -> int:
        """The smallest limit that works, in the user's terms."""
        return self.least_in(self.request.mode)

    def least_in(self, mode: str) -> int:
        """The same in `mode`."""
        return least_in_flight(self.chain, mode, self.request.in_flight, -self.more) - self.more

    def solve(self, asked: int) -> Sequence:
        """A sequence within the user's limit `asked`."""
        if self.shifted:
            found = self.request.solve(tails_in_backward(self.chain, self.tail_times), asked + self.more, -self.more)
        else:
            found = self.request.solve(self.chain, asked + self.more, -self.more)
            if self.request.policy is not None:
                return found
            exchanged = replay_forms(found.ops, partial(self._expected, found))
            if exchanged == found.ops or resting_bytes(self.chain, exchanged) > resting_bytes(self.chain, found.ops):
                return found
            found = replace(found, ops=exchanged)
        trace = simulate(self.chain, found)
        said = {"makespan": trace.makespan, "peak_bytes": trace.peak_bytes, "host_peak_bytes": trace.host_peak_bytes}
        return replace(found, meta={**found.meta, **said})

    def with_host_limit(self, nbytes: int) -> PlanVariant:
        """The same where no more than `nbytes`, nor than the user asked for, wait on the host."""
        options = self.request.options
        if (asked := options.get("host_limit")) is not None:
            nbytes = min(nbytes, parse_host_limit(asked))
        return replace(self, request=replace(self.request, options={**options, "host_limit": nbytes}))

    def _expected(self, found: Sequence, operations: Iterable[Op]) -> float:
        sequence = replace(found, ops=tuple(operations))
        return expected_step(self.chain, sequence, self.tail_times, self.upkeep, sequence.mem_limit).makespan

    def bound(self, asked: int) -> float:
        """Seconds that no sequence within the user's limit `asked` can beat."""
        return least_time_of(self.chain, asked + self.more, self.tail_times)


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
    kept, compact = tuple(sequence.meta.get(KEPT, ())), bool(sequence.meta.get(COMPACT))
    chosen = profile.keeping(kept, compact)
    plan = compile_sequence(
        chosen.chain,
        sequence,
        sequence.mem_limit,
        kept,
        compact,
        profile.tail_times,
        chosen.upkeep,
        request.in_flight,
    )
    plan = replace(plan, keeps_all=bool(sequence.meta.get(PLAIN)), lets_go=request.lets_go)
    _report(profile, request, plan, time.perf_counter() - began)
    return plan


def _decide(profile: Profile, request: Request, room: int | None, near: tuple[Known, ...], thorough: bool) -> Sequence:
    """All that `make_plan` decides, as a sequence and its meta. room: host bytes that there are for it; None: enough.

    Raises:
        InfeasibleError: where nothing fits, in the terms of the user's limit.
    """
    asked = request.mem_limit
    everything = plan_everything(profile, request.plain, request.lets_go, request.in_flight)
    if request.policy is None and reported_bytes(profile, everything) <= asked:
        return _meant(everything.sequence, {KEPT: list(everything.kept), PLAIN: everything.keeps_all})
    ways = _ways(profile, request)
    try:
        if asked < profile.prefix_peak_bytes:
            raise InfeasibleError("", min(way.least for way in ways))
        quick = near and request.policy is None and request.in_flight == 1
        found = _quickly(profile, request, ways, near, room) if quick else None
        if found is None and not thorough and request.in_flight == 1:
            raise InfeasibleError("a short search found nothing", min(way.least for way in ways))
        return _best_within(room, profile, request, ways) if found is None else found
    except InfeasibleError as error:
        if str(error):  # of the host's memory, which says all
            raise
        least = (
            least_limit(profile, request)
            if request.policy is None
            else max(error.min_mem_limit, profile.prefix_peak_bytes)
        )
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
        kept, compact = tuple(sequence.meta.get(KEPT, ())), bool(sequence.meta.get(COMPACT))
    effort = {"refine": EFFORT * profile.chain.compute_time, **request.options}
    quick = [replace(way, request=replace(way.request, options=effort)) for way in ways if not way.shifted]
    quick.sort(key=lambda way: (way.kept, way.compact) != (kept, compact))
    found = None
    for way in quick if reused is None else quick[:1]:  # the first that holds is enough
        try:
            found = _best_within(room, profile, replace(request, options=effort), [way])
        except InfeasibleError:
            continue
        break
    if found is None or (reused is not None and reused[0] <= _seconds(found, quick)):
        return None if reused is None else reused[1]
    return found


def _reused(
    asked: int, ways: list[PlanVariant], near: tuple[Known, ...], room: int | None
) -> tuple[float, Sequence] | None:
    """The fastest of the plans `near` that holds here, too, and its seconds."""
    best: tuple[float, Sequence] | None = None
    for (profile, plan), way in product(near, ways):
        if (plan.kept, plan.compact) != (way.kept, way.compact) or way.shifted or asked + way.more <= 0:
            continue
        ops = _in_forms_of(plan.sequence.ops, profile, way)
        if ops is None:
            continue
        sequence = replace(plan.sequence, ops=ops, mem_limit=asked + way.more)
        try:
            trace = expected_step(way.chain, sequence, way.tail_times, way.upkeep, sequence.mem_limit)
        except InvalidSequenceError:
            continue
        if (room is None or trace.host_peak_bytes <= room) and (best is None or trace.makespan < best[0]):
            said = {
                "makespan": trace.makespan,
                "peak_bytes": trace.peak_bytes,
                "host_peak_bytes": trace.host_peak_bytes,
            }
            best = trace.makespan, _meant(replace(sequence, meta=said), {KEPT: list(way.kept), COMPACT: way.compact})
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
    said = tuple(sequence.meta.get(KEPT, ())), bool(sequence.meta.get(COMPACT))
    way = next(way for way in ways if (way.kept, way.compact) == said)
    return expected_step(way.chain, sequence, way.tail_times, way.upkeep).makespan


def _meant(sequence: Sequence, said: dict[str, Any]) -> Sequence:
    """`sequence` with what is `said` of it, where that is anything, in its meta."""
    return replace(sequence, meta={**sequence.meta, **{name: value for name, value in said.items() if value}})


def plan_everything(profile: Profile, plain: bool = True, lets_go: bool = False, in_flight: int = 1) -> ExecutionPlan:
    """The plan that keeps everything, by the account that charges least for it. plain: whether it is the plain model
    that runs. lets_go, in_flight: as of `Request`."""
    chains = {kept: profile.keeping(kept).chain for kept in choices(profile.skips)}
    plans = [
        compile_sequence(chain, keep_all(chain), kept=kept, in_flight=in_flight) for kept, chain in chains.items()
    ]  # which replay nothing
    return replace(min(plans, key=lambda plan: simulated_bytes(profile, plan)), keeps_all=plain, lets_go=lets_go)


def least_limit(profile: Profile, request: Request) -> int:
    """The smallest limit, in the user's terms, that `make_plan` can keep in the request's mode."""
    least = min(way.least for way in _ways(profile, request))
    if request.policy is None:
        least = min(
            least, reported_bytes(profile, plan_everything(profile, request.plain, request.lets_go, request.in_flight))
        )
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
    fitting = [chain for chain, limit in limits.items() if limit >= min_mem_limit(chain, "joint")]
    if not fitting:
        everything = plan_everything(profile, request.plain, request.lets_go, request.in_flight)
        if (
            reported_bytes(profile, everything) <= request.mem_limit
        ):  # the plain model, which takes less than a plan would
            return everything.trace.makespan
        raise _infeasible(profile, request, min(way.least for way in ways), ways)
    return min(least_time_of(chain, limits[chain], profile.tail_times) for chain in fitting)


def _ways(profile: Profile, request: Request) -> list[PlanVariant]:
    """What to solve. Skip connections are carried, or some of them kept in place; gradients that wait lie where they
    were made, or are copied, which comes last, since it takes time. A policy of the papers knows carrying only.

    Snapshots for replays come off the limit, unless nothing is replayed: so joint is also asked for offload alone, or
    it would be behind that mode by these bytes. Where the solver does not know what tails spare, it also gets the chain
    on which it does; there joint must ask for remat as well, since what the machine thinks slower may be expected to be
    faster.
    """
    ways = []
    forms = tuple(tuple(recipe.identity for recipe in behaviour.forms) for behaviour in profile.behaviours)
    unpriced = request.policy is None and request.replays and _unpriced(profile)
    choice = [(kept, compact) for compact in (False, True) for kept in choices(profile.skips)]
    for kept, compact in choice if request.policy is None else [((), False)]:
        if compact and profile.compact is None:
            continue
        chosen = profile.keeping(kept, compact)
        offset = chosen.resident_input_bytes - chosen.unmanaged_bytes - chosen.snapshot_bytes
        more = offset - chosen.replay_bytes if request.replays else offset
        for mode in ("joint", "remat") if unpriced and request.mode == "joint" else (request.mode,):
            asked = replace(request, mode=mode)
            ways.append(
                PlanVariant(kept, compact, chosen.chain, asked, more, profile.tail_times, False, chosen.upkeep, forms)
            )
            if unpriced:
                ways.append(replace(ways[-1], shifted=True))
        if request.policy is None and request.mode == "joint" and chosen.replay_bytes:
            asked = replace(request, mode="offload")
            ways.append(
                PlanVariant(kept, compact, chosen.chain, asked, offset, profile.tail_times, False, chosen.upkeep, forms)
            )
    return ways


def _unpriced(profile: Profile) -> bool:
    """Whether closing replays may spare much that no form tells the solver of."""
    rows = zip(profile.chain.stages, profile.tail_times, strict=True)
    return sum(tail for stage, tail in rows if not stage.forms) > UNPRICED * profile.chain.compute_time


def _best(asked: int, ways: list[PlanVariant]) -> Sequence:
    """The fastest sequence of all ways; its meta says which skip connections it keeps in place, and whether it copies
    gradients.

    Raises:
        InfeasibleError: where none fits; `min_mem_limit` is in the user's terms.
    """
    best: tuple[float, Sequence] | None = None
    least_on_lanes = math.inf  # of those solved, without upkeep
    least: list[int] = []
    for way in ways:
        if least_on_lanes <= way.chain.compute_time:
            break  # nothing can be faster but by upkeep
        try:
            if asked + way.more <= 0:
                raise InfeasibleError("", way.least + way.more)
            if best is not None and way.bound(asked) >= best[0]:
                continue
            sequence = way.solve(asked)
        except InfeasibleError as error:
            least.append(error.min_mem_limit - way.more)
            continue
        time = expected_step(way.chain, sequence, way.tail_times, way.upkeep).makespan
        least_on_lanes = min(least_on_lanes, expected_step(way.chain, sequence, way.tail_times).makespan)
        if best is None or time < best[0]:
            best = time, _meant(sequence, {KEPT: list(way.kept), COMPACT: way.compact})
    if best is None:
        raise InfeasibleError("", min(least))
    return best[1]


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
    kept, compact = tuple(sequence.meta.get(KEPT, ())), bool(sequence.meta.get(COMPACT))
    return slab_bytes(profile.keeping(kept, compact).chain, sequence)


def _no_room(profile: Profile, request: Request, ways: list[PlanVariant], needed: int, room: int) -> InfeasibleError:
    without = [way.least_in("remat") for way in ways if way.request.mode != "offload"]
    least = max(
        min(
            [
                reported_bytes(profile, plan_everything(profile, request.plain, request.lets_go, request.in_flight)),
                *without,
            ]
        ),
        profile.prefix_peak_bytes,
    )
    return InfeasibleError(
        f"the training step {request} within {format_bytes(request.mem_limit)} ({request.mem_limit} bytes) keeps {needed} bytes in pinned"
        f" host memory, and {room} are available; give a limit of at least {format_bytes(least)} ({least} bytes), which needs none, give"
        " the process more memory, or say in the environment that there is more (ROTOFF_HOST_MEMORY)",
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
                f"{binds}, {format_bytes(profile.beside_loss_bytes)} of it for gradients of what is returned beside the loss; if no"
                ' backward starts there, name the output where it does: Checkpointable(model, backward_from="loss")'
            )
    return ""


def reported_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """The peak of `plan` that is held against a limit: the machine's, or that of the plain model where everything is
    kept."""
    return expected_bytes(profile, plan) if plan.keeps_all else simulated_bytes(profile, plan)


def simulated_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """The machine's peak in the terms of the user's limit."""
    levels = _told(profile, plan, [event.memory for event in plan.trace.events])
    return max(*levels, profile.prefix_peak_bytes)


def expected_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """What a step is expected to hold at most: the highest of `expected_levels`, or what comes before the chain."""
    return max(*expected_levels(profile, plan), profile.prefix_peak_bytes)


def expected_levels(profile: Profile, plan: ExecutionPlan) -> list[int]:
    """Of each operation, the most that a step is expected to hold while it runs: what the machine charges, in the terms
    of the user's limit, less what is sure not to be there.

    That is in a ``B`` of everything saved what the stage has let go of when it begins, in the user's forward δ_L, which
    the loss has yet to make, and whatever several values share. Of the plain model, values that nobody saved once it
    has let go of them; and what its own code holds longer than a stage is added.
    """
    L = len(profile.chain)
    made, whole = False, set()
    levels = []
    carried = [skip for n, skip in enumerate(profile.skips) if n not in plan.kept]
    chosen = profile.keeping(plan.kept, plan.compact)
    shared = shared_bytes(chosen.chain, carried, plan.sequence.ops)
    for n, event in enumerate(plan.trace.events):
        op, less = event.op, shared[n]
        if op.kind is OpKind.B:
            less += chosen.freed_before_backward[op.stage - 1] if op.stage in whole else 0
        elif made and n < plan.forward_end:
            less += profile.chain.grad_bytes(L)
        if op.kind is OpKind.F_ALL:
            whole.add(op.stage)
        elif op.kind is OpKind.F_SEL:
            whole.discard(op.stage)
        if plan.keeps_all:
            less += _passed(profile, op) + (_let_go(profile, op) if plan.lets_go else 0)
            less += profile.outside_bytes[op.stage - 1] if profile.outside_bytes and op.kind in FORWARDS else 0
        made = made or (op.kind in FORWARDS and op.stage == L)
        levels.append(event.memory - less)
    return _told(profile, plan, levels)


def _passed(profile: Profile, op: Op) -> int:
    """Bytes that the plain model has let go of when its ``F`` or ``B`` of a stage begins, or has once, and that are
    still charged once more; less those that its ``F`` holds and that are not charged."""
    i = op.stage
    if op.kind is OpKind.B:
        return sum(one.nbytes for one in profile.passing if one.first < i) + sum(profile.twice_bytes[: i - 1])
    held = sum(one.nbytes for one in profile.lingering if one.first < i <= one.until)
    return sum(one.nbytes for one in profile.passing if one.until < i) - held + sum(profile.twice_bytes)


def _let_go(profile: Profile, op: Op) -> int:
    """Bytes of what the model has returned that its caller has let go when a ``B`` begins, and that are charged."""
    if op.kind is not OpKind.B:
        return 0
    gone = profile.freed_before_backward[op.stage - 1]  # of which the output of the stage may be a part
    made = sum(one.nbytes for one in profile.returned if one.first == op.stage)
    return sum(one.nbytes for one in profile.returned if one.first < op.stage) + max(0, made - gone)


def resting_memory(profile: Profile, plan: ExecutionPlan) -> int:
    """Bytes that a step holds between forward and backward, in the terms of the user's limit; of a plan for several in
    flight."""
    return plan.resting_bytes + _constant(profile, plan)


def _constant(profile: Profile, plan: ExecutionPlan) -> int:
    """What is added to the machine's bytes in each step."""
    constant = profile.unmanaged_bytes + profile.kept_bytes(plan.kept) - profile.resident_input_bytes
    return constant + (0 if plan.keeps_all else profile.snapshot_bytes)


def _told(profile: Profile, plan: ExecutionPlan, levels: list[int]) -> list[int]:
    """The machine's `levels` during the plan's events in the terms of the user's limit, with what rests meanwhile."""
    constant = _constant(profile, plan) + (plan.in_flight - 1) * resting_memory(profile, plan)
    beside, forms, again = profile.replay_extra(plan.replayed), dict[int, int](), []
    for event in plan.trace.events:
        redone = event.recompute
        if event.op.kind in FORWARDS:
            forms[event.op.stage] = event.op.form
        elif event.op.kind is OpKind.B:
            redone = forms[event.op.stage] > 0
        again.append(beside[event.op.stage] if redone else 0)
    return [level + more + constant for level, more in zip(levels, again, strict=True)]


def _report(profile: Profile, request: Request, plan: ExecutionPlan, seconds: float = 0.0) -> None:
    trace, base = plan.trace, profile.chain.compute_time
    logger.info(
        "rotoff: planned %s in %.1f s, limit %s, predicted peak %s, step %.4g s (%+.1f %% over keeping everything), %s offloaded,"
        " %.4g s recomputed; %s%s",
        request,
        seconds,
        "none" if request.mem_limit >= NO_LIMIT else format_bytes(request.mem_limit),
        format_bytes(expected_bytes(profile, plan)),
        trace.makespan,
        100 * (trace.makespan / base - 1) if base else 0.0,
        format_bytes(trace.d2h_bytes),
        trace.recompute_time,
        in_words(plan.sequence),
        f"; {len(plan.kept)} skip connections stay on the device ({format_bytes(profile.kept_bytes(plan.kept))})"
        if plan.kept
        else "",
    )
