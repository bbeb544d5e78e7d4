"""Makes a plan from a profile and a request, and converts limits between the user's terms and the machine's."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..core.chain import Chain
from ..core.sequence import Op, OpKind, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..core.trace import figures
from ..errors import InfeasibleError, InvalidSequenceError
from ..io.cache import Cache
from ..profile.measure import UsedForm
from ..profile.memory.skips import choices
from ..profile.profile import Profile
from ..report.rotor_names import NO_LIMIT
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_sequence, slab_bytes
from ..runtime.links.pinned import room_for_plan
from ..solver import keep_all
from ..solver.anneal import CLOSE, least_compute
from ..solver.bounds import SUM_ERROR, largest_operation, least_time_of, min_mem_limit
from ..solver.in_flight import least_in_flight
from ..solver.search import SharedProblems, parse_host_limit
from .distributed import agree_on_limit, agree_on_sequence
from .memory_account import expected_bytes, reported_bytes, simulated_bytes
from .request import Request

logger = logging.getLogger("rotoff")
GOOD = 1.005  # step time / compute time up to which another size's plan is as good as one that a search finds
EFFORT = 0.03  # search time / compute time of a step, if no plan is reused at once
WORTH = 1.005  # step time / best step time up to which a variant then gets the whole effort
KEPT = "kept_skips"  # in a sequence's meta: numbers of the profile's skip connections that its chain leaves out
PLAIN = "plain_model"  # likewise: whether the plain model runs
COMPACT = "compact_gradients"  # likewise: whether waiting gradients are copied


@dataclass(frozen=True)
class PlanVariant:
    """One problem to solve for a request: `request` on `chain`, with `more` bytes added to the user's limit.

    kept: numbers of the profile's skip connections that stay in place; `chain` leaves them out. compact: whether
    waiting gradients are copied. forms: for each stage, the identities of its smaller forms.
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
        """This variant with a host limit of `nbytes`, or the user's if that is smaller."""
        options = self.request.options
        if (asked := options.get("host_limit")) is not None:
            nbytes = min(nbytes, parse_host_limit(asked))
        return replace(self, request=replace(self.request, options={**options, "host_limit": nbytes}))

    def shortened(self) -> PlanVariant:
        """This variant with a shorter search."""
        return replace(self, request=self.request.shortened())


KnownPlan = tuple[Profile, ExecutionPlan]


def make_plan(
    profile: Profile,
    request: Request,
    group: Any = None,
    near: Iterable[KnownPlan] = (),
    thorough: bool = True,
    better: bool = True,
) -> ExecutionPlan:
    """Plan within the user's limit, less the constants of a step, plus the batch.

    group: a process group that follows the first process's plan, or None. near: plans of the same stages at other
    sizes; one that is good enough is reused, so that a new size needs no search. better: whether to search if one fits
    and is not. thorough: whether to search at length if neither these nor a short search give a plan.

    Raises:
        InfeasibleError: if nothing fits, in the terms of the user's limit.
    """
    if request.planner is not None:
        return request.planner(profile, request, tuple(near), thorough)
    began = time.perf_counter()
    room = _room(profile, group) if request.here else None

    def decide() -> Sequence:
        return _decide(profile, request, room, tuple(near), thorough, GOOD if better else math.inf)

    sequence = decide() if group is None else agree_on_sequence(decide, group)
    kept, compact = _choice(sequence)
    plain = bool(sequence.meta.get(PLAIN))
    chosen = profile.keeping(kept, compact, request.lets_go and not plain)
    if not plain:
        chosen = chosen.with_overhead()
    how = kept, compact, request.in_flight, request.lets_go
    plan = replace(compile_sequence(chosen.chain, sequence, sequence.mem_limit, *how), keeps_all=plain)
    _report(profile, request, plan, time.perf_counter() - began)
    return plan


def _decide(
    profile: Profile, request: Request, room: int | None, near: tuple[KnownPlan, ...], thorough: bool, good: float
) -> Sequence:
    """All that `make_plan` decides, as a sequence and its meta. room: free host bytes; None: unknown. good: step time /
    compute time up to which a plan `near` is reused without a search.

    Raises:
        InfeasibleError: if nothing fits, in the terms of the user's limit.
    """
    everything = _everything(profile, request)
    if request.policy is None and reported_bytes(profile, everything) <= request.mem_limit:
        return _with_meta(everything.sequence, {KEPT: list(everything.kept), PLAIN: everything.keeps_all})
    variants = _variants(profile, request)
    try:
        if request.mem_limit < profile.prefix_peak_bytes:
            raise InfeasibleError("", min(variant.least for variant in variants))
        quick = near and request.policy is None and request.in_flight == 1
        found = _quickly(profile, request, variants, near, room, good) if quick else None
        if found is None and not thorough and request.in_flight == 1:
            raise InfeasibleError("a short search found nothing", min(variant.least for variant in variants))
        return _best_within(room, profile, request, variants) if found is None else found
    except InfeasibleError as error:
        if str(error):  # about host memory, with a complete message
            raise
        least = max(error.min_mem_limit, profile.prefix_peak_bytes)
        least = least_limit(profile, request) if request.policy is None else least
        raise _infeasible(profile, request, least, variants) from None


def _quickly(
    profile: Profile,
    request: Request,
    variants: list[PlanVariant],
    near: tuple[KnownPlan, ...],
    room: int | None,
    good: float,
) -> Sequence | None:
    """The faster of the best plan `near` and a short search's; None if neither fits."""
    reused = _reused(request.mem_limit, variants, near, room)
    kept, compact = near[0][1].kept, near[0][1].compact
    if reused is not None:
        seconds, sequence = reused
        if seconds <= good * profile.chain.compute_time:
            return sequence
        kept, compact = _choice(sequence)
    effort = {"refine": EFFORT * profile.chain.compute_time, **request.options}
    quick = [replace(variant, request=replace(variant.request, options=effort)) for variant in variants]
    quick.sort(key=lambda variant: (variant.kept, variant.compact) != (kept, compact))
    found = None
    for variant in quick if reused is None else quick[:1]:  # the first that fits is enough
        try:
            found = _best_within(room, profile, replace(request, options=effort), [variant])
            break
        except InfeasibleError:
            continue
    if found is None or (reused is not None and reused[0] <= _seconds(found, quick)):
        return None if reused is None else reused[1]
    return found


def _reused(
    asked: int, variants: list[PlanVariant], near: tuple[KnownPlan, ...], room: int | None
) -> tuple[float, Sequence] | None:
    """The fastest of the plans `near` that fits this size, and its seconds; None if none fits."""
    best: tuple[float, Sequence] | None = None
    for (profile, plan), variant in product(near, variants):
        if (plan.kept, plan.compact) != (variant.kept, variant.compact) or asked + variant.more <= 0:
            continue
        ops = in_forms_of(plan.sequence.ops, profile, variant.forms)
        if ops is None:
            continue
        sequence = replace(plan.sequence, ops=ops, mem_limit=asked + variant.more)
        try:
            trace = simulate(variant.chain, sequence, sequence.mem_limit)
        except InvalidSequenceError:
            continue
        if (room is None or trace.host_peak_bytes <= room) and (best is None or trace.makespan < best[0]):
            sequence = replace(sequence, meta=figures(trace))
            best = trace.makespan, _with_meta(sequence, {KEPT: list(variant.kept), COMPACT: variant.compact})
    return best


def in_forms_of(ops: tuple[Op, ...], profile: Profile, forms: Several[Several[Hashable]]) -> tuple[Op, ...] | None:
    """`ops` of a plan for `profile`, with their forms renumbered as in `forms`, the identities of each stage's; None if
    one is missing."""
    if len(profile.chain) != len(forms):
        return None
    found = []
    for op in ops:
        if op.kind is OpKind.F_SEL:
            identity = profile.behaviours[op.stage - 1].forms[op.form - 1].identity
            if identity not in forms[op.stage - 1]:
                return None
            op = replace(op, form=1 + forms[op.stage - 1].index(identity))
        found.append(op)
    return tuple(found)


def _seconds(sequence: Sequence, variants: list[PlanVariant]) -> float:
    """Simulated seconds of `sequence`, which was found for one of `variants`."""
    variant = next(variant for variant in variants if (variant.kept, variant.compact) == _choice(sequence))
    return simulate(variant.chain, sequence).makespan


def _choice(sequence: Sequence) -> tuple[tuple[int, ...], bool]:
    """The skip connections that `sequence` keeps in place, and whether it copies gradients."""
    return tuple(sequence.meta.get(KEPT, ())), bool(sequence.meta.get(COMPACT))


def _with_meta(sequence: Sequence, said: dict[str, Any]) -> Sequence:
    """`sequence` with the true or nonempty values of `said` in its meta."""
    return replace(sequence, meta={**sequence.meta, **{name: value for name, value in said.items() if value}})


def useful_forms(profile: Profile, request: Request) -> list[UsedForm] | None:
    """The smaller forms that a short search for `request` uses; None if nothing fits."""
    try:
        sequence = _decide(profile, replace(request.shortened(), cache=Cache(None)), None, (), True, GOOD)
    except InfeasibleError:
        return None
    used = dict.fromkeys((op.stage, op.form) for op in sequence if op.kind is OpKind.F_SEL)
    return [UsedForm(i, profile.behaviours[i - 1].forms[k - 1].identity) for i, k in used]


def plan_everything(profile: Profile, plain: bool = True, lets_go: bool = False, in_flight: int = 1) -> ExecutionPlan:
    """The plan that keeps everything, with the choice of skip connections that is charged least. plain: whether the
    plain model runs. lets_go, in_flight: as for `Request`."""
    chains = {kept: profile.keeping(kept, False, lets_go and not plain).chain for kept in choices(profile.skips)}
    plans = [
        compile_sequence(chain, keep_all(chain), kept=kept, in_flight=in_flight, lets_go=lets_go)
        for kept, chain in chains.items()
    ]
    return replace(min(plans, key=lambda plan: simulated_bytes(profile, plan)), keeps_all=plain)


def _everything(profile: Profile, request: Request) -> ExecutionPlan:
    return plan_everything(profile, request.plain, request.lets_go, request.in_flight)


def least_limit(profile: Profile, request: Request) -> int:
    """The smallest limit, in the user's terms, that `make_plan` can keep in the request's mode."""
    least = min(variant.least for variant in _variants(profile, request))
    if request.policy is None:
        least = min(least, reported_bytes(profile, _everything(profile, request)))
    return max(least, profile.prefix_peak_bytes, 1)


def least_time(profile: Profile, request: Request, found: float = math.inf) -> float:
    """Seconds that no step within the request's limit can beat.

    found: seconds of a plan. Where the time of all compute alone is as close to it as `CLOSE`, that is the bound: a
    linear program could raise it by no more.

    Raises:
        InfeasibleError: if nothing fits.
    """
    variants = _variants(profile, replace(request, mode="joint"))
    limits: dict[Chain, int] = {}  # for one micro-batch: several in flight have no more each
    for variant in variants:
        limits[variant.chain] = max(limits.get(variant.chain, 0), request.mem_limit + variant.more)
    everything = _everything(profile, request)
    if reported_bytes(profile, everything) <= request.mem_limit:  # the plain model, without the runtime's overhead
        return everything.trace.makespan
    fitting = [chain for chain, limit in limits.items() if limit >= min_mem_limit(chain, "joint")]
    if not fitting:
        raise _infeasible(profile, request, min(variant.least for variant in variants), variants)
    alone = min(map(least_compute, fitting))
    if found <= CLOSE * alone:
        return alone * (1 - SUM_ERROR)
    return min(least_time_of(chain, limits[chain]) for chain in fitting)


def _variants(profile: Profile, request: Request) -> list[PlanVariant]:
    """The variants to solve. Values carry skip connections, or some of these stay in place; waiting gradients stay
    where they were made, or are copied (last, since copying takes time). A policy of the papers only carries.

    Snapshots for replays are taken off the limit, unless nothing is replayed. So joint also tries offload alone, which
    has these bytes more.
    """
    variants = []
    forms = tuple(tuple(recipe.identity for recipe in behaviour.forms) for behaviour in profile.behaviours)
    choice = [(kept, compact) for compact in (False, True) for kept in choices(profile.skips)]
    for kept, compact in choice if request.policy is None else [((), False)]:
        if compact and profile.compact is None:
            continue
        chosen = profile.keeping(kept, compact, request.lets_go).with_overhead()
        offset = chosen.resident_input_bytes - chosen.unmanaged_bytes - chosen.snapshot_bytes
        more = offset - chosen.replay_bytes if request.replays else offset
        variant = PlanVariant(kept, compact, chosen.chain, request, more, forms)
        variants.append(variant)
        if request.policy is None and request.mode == "joint" and chosen.replay_bytes:
            variants.append(replace(variant, request=replace(request, mode="offload"), more=offset))
    return variants


def _best(asked: int, variants: list[PlanVariant]) -> Sequence:
    """The fastest sequence of all variants, with `KEPT` and `COMPACT` in its meta. A short search of each variant
    selects those that get the whole effort.

    Raises:
        InfeasibleError: if none fits; `min_mem_limit` is in the user's terms.
    """
    shared = variants[0].request.shared or SharedProblems()
    variants = [replace(variant, request=replace(variant.request, shared=shared)) for variant in variants]
    found: list[tuple[float, int, Sequence]] = []
    short = [variant.shortened() for variant in variants]
    if len(variants) > 1 and short != variants:
        found, _ = _solved(asked, short)
    fastest = min((seconds for seconds, *_ in found), default=math.inf)
    near = [n for seconds, n, _ in found if seconds <= WORTH * fastest] or range(len(variants))
    open_still = [n for n in near if fastest > CLOSE * variants[n].chain.compute_time]
    longer, least = _solved(asked, [variants[n] for n in open_still])
    found += [(seconds, open_still[n], sequence) for seconds, n, sequence in longer]
    if not found:
        raise InfeasibleError("", min(least))
    _, n, sequence = min(found, key=lambda one: one[0])
    return _with_meta(sequence, {KEPT: list(variants[n].kept), COMPACT: variants[n].compact})


def _solved(asked: int, variants: list[PlanVariant]) -> tuple[list[tuple[float, int, Sequence]], list[int]]:
    """For each variant that fits, (seconds of a step, index in `variants`, sequence); for the others, the smallest
    limit in the user's terms. Stops when no later variant can be faster."""
    found, least = [], []
    fastest = math.inf
    for n, variant in enumerate(variants):
        if fastest <= CLOSE * variant.chain.compute_time:
            break
        try:
            if asked + variant.more <= 0:
                raise InfeasibleError("", variant.least + variant.more)
            sequence = variant.solve(asked)
        except InfeasibleError as error:
            least.append(error.min_mem_limit - variant.more)
            continue
        seconds = simulate(variant.chain, sequence).makespan
        found.append((seconds, n, sequence))
        fastest = min(fastest, seconds)
    return found, least


def _room(profile: Profile, group: Any) -> int | None:
    """The fewest free host bytes of any process of the group; None if none of them is known."""

    def room_here() -> int:
        room = room_for_plan(profile.device)
        return NO_LIMIT if room is None else room

    least = room_here() if group is None else agree_on_limit(room_here, group)
    return None if least >= NO_LIMIT else least


def _best_within(room: int | None, profile: Profile, request: Request, variants: list[PlanVariant]) -> Sequence:
    """The result of `_best`; if its slab of host memory exceeds `room` bytes, the best with a host limit.

    With the host limit from the start, the result and its key in the cache would change with every small change of free
    host memory.

    Raises:
        InfeasibleError: as `_best`, or with a message if the room does not suffice.
    """
    found = first = _best(request.mem_limit, variants)
    limit = room
    while room is not None and limit is not None and (needed := request.in_flight * _slab_bytes(profile, found)) > room:
        if found is not first:  # the slab is larger than the host limit by gaps between values
            limit = max(0, limit - (needed - room))
        try:
            if request.policy is not None:
                raise InfeasibleError("", 0)
            found = _best(request.mem_limit, [variant.with_host_limit(limit) for variant in variants])
        except InfeasibleError:
            needed = request.in_flight * _slab_bytes(profile, first)
            raise _no_room(profile, request, variants, needed, room) from None
    return found


def _slab_bytes(profile: Profile, sequence: Sequence) -> int:
    return slab_bytes(profile.keeping(*_choice(sequence)).chain, sequence)  # what is let go never moves


def _no_room(
    profile: Profile, request: Request, variants: list[PlanVariant], needed: int, room: int
) -> InfeasibleError:
    without = [variant.least_in("remat") for variant in variants if variant.request.mode != "offload"]
    least = min([reported_bytes(profile, _everything(profile, request)), *without])
    least = max(least, profile.prefix_peak_bytes)
    return InfeasibleError(
        f"the training step {request} within {format_bytes(request.mem_limit)} ({request.mem_limit} bytes) keeps"
        f" {needed} bytes in pinned host memory, and {room} are available; give a limit of at least"
        f" {format_bytes(least)} ({least} bytes), which needs none, give the process more memory, or say in the"
        " environment that there is more (ROTOFF_HOST_MEMORY)",
        least,
    )


def _infeasible(profile: Profile, request: Request, least: int, variants: list[PlanVariant]) -> InfeasibleError:
    needs = f"the training step needs at least {format_bytes(least)} ({least} bytes)"
    limit = f"{format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
    if least <= request.mem_limit and (host := request.options.get("host_limit")) is not None:
        found = f"nothing was found {request} within {limit} on the device and host_limit={host!r}"
        return InfeasibleError(f"{found}; without a host_limit {needs}, so give a larger host_limit", least)
    return InfeasibleError(f"{needs} {request}; the limit is {limit}{_binding(profile, least, variants)}", least)


def _binding(profile: Profile, least: int, variants: list[PlanVariant]) -> str:
    """The part of the error that names the operation that alone needs `least` bytes; empty if no single one does."""
    for variant in variants:
        phase, stage, nbytes = largest_operation(variant.chain)
        if nbytes - variant.more == least:
            stage_name = f"stage {stage} ({variant.chain.stage(stage).name})"
            binds = f". The {phase} of {stage_name} alone needs {format_bytes(least)}"
            if stage < len(variant.chain) or not profile.beside_loss_bytes:
                return binds
            return (
                f"{binds}, {format_bytes(profile.beside_loss_bytes)} of it for gradients of outputs beside the loss;"
                " if no backward starts from those, name the output that it starts from: Checkpointable(model,"
                ' backward_from="loss")'
            )
    return ""


def _report(profile: Profile, request: Request, plan: ExecutionPlan, seconds: float) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return  # a new size of input should cost little
    trace, base = plan.trace, profile.chain.compute_time
    everything = format_bytes(reported_bytes(profile, _everything(profile, request)))
    limit = "there is no limit" if request.mem_limit >= NO_LIMIT else f"the limit is {format_bytes(request.mem_limit)}"
    if not profile.timed:
        logger.info("rotoff: keeping everything takes %s, and %s: the model runs as it is", everything, limit)
        return
    logger.info(
        "rotoff: keeping everything takes %s, the smallest limit %s is %s, and %s",
        everything,
        request,
        format_bytes(least_limit(profile, request)),
        limit,
    )
    logger.info(
        "rotoff: planned in %.1f s, predicted peak %s, step %.4g s (%+.1f %% over keeping everything), %s offloaded,"
        " %.4g s recomputed; %s%s%s",
        seconds,
        format_bytes(expected_bytes(profile, plan)),
        trace.makespan,
        round(100 * (trace.makespan / base - 1), 1) + 0.0 if base else 0.0,  # never -0.0
        format_bytes(trace.d2h_bytes),
        trace.recompute_time,
        in_words(plan.sequence),
        f"; {len(plan.kept)} skip connections stay on the device ({format_bytes(profile.kept_bytes(plan.kept))})"
        if plan.kept
        else "",
        "" if (times := profile.chain.meta.get("times", "measured")) == "measured" else f"; times were {times}",
    )
