"""Plans for a `device_limit`: one limit for parameters, gradients, optimizer states, the batch and the step."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..accelerator import block_bytes, is_accelerator
from ..core.chain import Chain, LinkRates, ParameterGroup
from ..core.sequence import FORWARDS, OpKind, Sequence, Value
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..core.steady_step import at_rest, group_bytes
from ..errors import InfeasibleError, OptionError
from ..profile.optimizer_probe import OptimizerProbe, UpdateCosts
from ..profile.parameter_groups import FoundGroups, find_groups, groups_apart
from ..profile.profile import Profile
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_placed, compile_sequence
from ..runtime.links.pinned import room_for_plan
from ..runtime.placed.in_turn import bytes_in_turn
from ..runtime.placed.placed_plan import PlacedGroup, PlacedPlan
from ..runtime.placed.tensor import checksum_bytes
from ..runtime.placed.updates import parameters_of
from ..solver import keep_all, solve
from ..solver.bounds import min_mem_limit
from ..solver.search import parse_host_limit
from ..tensors.storage import rounded
from .memory_account import expected_levels, reported_bytes, simulated_levels
from .planner import KnownPlan, in_forms_of, plan_everything
from .request import Request

logger = logging.getLogger("rotoff")
EFFORT = 0.1  # search time / compute time of a step, if training has begun
AMPLE = 1.25  # limit / bytes of the largest operation, from which on a search finds a plan, whatever the times are
TRIES = 4  # solver calls, each with a smaller limit, until the bytes that the machine does not charge fit, too
LONGER = 2  # those with the whole search effort, if a short search has found a limit that works
_CASTS = (
    "; weights that autocast casts for several calls stay on the device, unless it keeps no casts"
    " (torch.autocast(..., cache_enabled=False))"
)


def read_optimizers(given: Any, model: nn.Module) -> tuple[Optimizer, ...]:
    """The optimizers, or one, that `given` is or that trainers have wrapped; none for None, if `model` is frozen.

    Raises:
        OptionError: for anything else, and if none of them updates a parameter of `model`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if given is None and trained:
        raise OptionError(
            f"device_limit needs the optimizer, whose states count, since {len(trained)} parameters need gradients:"
            " compute_sequence(device_limit=..., optimizer=optimizer)"
        )
    found: list[Optimizer] = []
    for optimizer in given if isinstance(given, (list, tuple)) else () if given is None else (given,):
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            shown = repr(optimizer) if isinstance(optimizer, (str, type)) else f"a {type(optimizer).__name__}"
            raise OptionError(
                f"optimizer is {shown}; give a torch.optim.Optimizer of the model's parameters, such as"
                " torch.optim.Adam(model.parameters()), or a list of them"
            )
        found.append(optimizer)
    updated = {id(parameter) for one in found for parameter in parameters_of(one)}
    if trained and given is not None and updated.isdisjoint(map(id, trained)):
        names = ", ".join(type(one).__name__ for one in found) or "an empty list"
        raise OptionError(
            f"optimizer is {names}, which updates no parameter of the model; make it of model.parameters()"
        )
    return tuple(found)


@dataclass(frozen=True)
class PlacedPlanner:
    """Plans steps of `model` with `optimizers` if a request's limit is for all that the device holds.

    times: update times measured before.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    times: dict[Any, UpdateCosts] = field(default_factory=dict, compare=False)

    def __call__(
        self, profile: Profile, request: Request, near: Several[KnownPlan] = (), thorough: bool = True
    ) -> ExecutionPlan:
        """The fastest of the plans `near` of other sizes that fits the request's limit, so that a new size needs no
        search and moves no parameters. If none fits, the fastest plan that a search finds, unless not `thorough`.

        Raises:
            InfeasibleError: if nothing fits; `min_mem_limit` is the smallest limit with a plan, or, if not `thorough`,
                a limit at which all fits.
        """
        began = time.perf_counter()
        read_optimizers(self.optimizers or None, self.model)  # its parameters may have been thawed
        whole = self.keep_all_bytes(profile)
        if whole <= request.mem_limit:
            return plan_everything(profile, plain=True)
        updated = [id(parameter) for one in self.optimizers for parameter in parameters_of(one)]
        if when(request) == "during" and len(updated) > len({*updated}):
            raise OptionError(
                'a parameter belongs to several optimizers, and updates="during" updates each by one alone; plan with'
                ' updates="after"'
            )
        request = _within_host(profile, request)
        ways = (False, True) if profile.device.type == "cpu" else (True,)  # a CPU shares its processor with the host
        every = [self.groups(profile, host) for host in ways]
        found = [groups.streaming(whole - request.mem_limit) for groups in every]
        reused = list(_reused(profile, request, every[-1], near))
        if reused:
            return min(reused, key=lambda plan: plan.trace.makespan)
        if not thorough:
            raise InfeasibleError("no plan of another size fits", whole)
        streaming = [groups.streaming(math.inf) for groups in every]
        smallest: ExecutionPlan | None = None
        if request.mem_limit < AMPLE * min(_floor(profile, request, groups) for groups in streaming):
            smallest = _smallest(profile, request, streaming, whole)
        if near:  # training has begun, and waits
            effort = {"refine": EFFORT * profile.chain.compute_time, **request.options}
            request = replace(request, options=effort)
        asked = itertools.product((request, _quick(request)), found)
        plans = (plan_groups(profile, how, groups, request.mem_limit) for how, groups in asked)
        plan = next(filter(None, plans), smallest) or _smallest(profile, request, streaming, whole)
        _report(request, plan, time.perf_counter() - began)
        return plan

    def groups(self, profile: Profile, host: bool) -> FoundGroups:
        """Groups of the model's parameters. host: whether the host may update them."""
        probe = OptimizerProbe(self.optimizers, profile.device, self.times)
        return find_groups(self.model, profile, probe, host)

    def waiting(self, device: torch.device) -> PlacedPlan:
        """Where parameters lie until a step is planned: on the host, all that can be placed. Forwards without
        gradients need no other plan."""
        probe = OptimizerProbe(self.optimizers, device, None)
        groups, outside = groups_apart(self.model, probe)
        here = probe.on_host(parameter for group in groups for parameter in group.parameters)
        return PlacedPlan(groups, frozenset(), frozenset(), frozenset(), outside=outside, on_host=here)

    def keep_all_bytes(self, profile: Profile) -> int:
        """The smallest limit at which the plain model and optimizer run unplanned."""
        groups = self.groups(profile, host=False)
        step = reported_bytes(profile, plan_everything(profile, plain=True))
        return groups.placed_bytes + _beside(profile, groups) + max(step, groups.update_bytes)

    def expected_bytes(self, profile: Profile, plan: ExecutionPlan) -> int:
        """The expected peak of `plan`. That of the plain model is less than `keep_all_bytes` if no gradients are there
        when a step begins."""
        if plan.placed is not None:
            return plan.placed.peak_bytes
        groups = self.groups(profile, host=False)
        profile = profile.placing(groups.costs)
        everything = compile_sequence(profile.chain, keep_all(profile.chain, "after"))
        levels = _step_levels(profile, groups, replace(everything, keeps_all=True))
        last = next(n for n, op in enumerate(everything.sequence) if op.kind is OpKind.B and op.stage == 1)
        updating = groups.placed_bytes + _beside(profile, groups) + groups.update_bytes
        return max(*levels[: last + 1], updating + profile.chain.output_bytes(len(profile.chain)))


def _quick(request: Request) -> Request:
    """`request` without a long search."""
    return replace(request, options={**request.options, "refine": False})


def when(request: Request) -> str:
    return str(request.options.get("updates", "after"))


def _within_host(profile: Profile, request: Request) -> Request:
    """`request` with a host limit of at most the free host memory, if that is known."""
    room = room_for_plan(profile.device) if request.here else None
    if room is None:
        return request
    if (asked := request.options.get("host_limit")) is not None:
        room = min(room, parse_host_limit(asked))
    return replace(request, options={**request.options, "host_limit": room})


def _beside(profile: Profile, groups: FoundGroups, during: bool = False) -> int:
    """Bytes that the device holds throughout, beyond those of a step under a `mem_limit` and those of `groups`: the
    batch, the caller's loss and its gradient, a checksum of a value that leaves, what stays of the model, and, if the
    backward updates, what marks each gradient as used up until the caller clears it."""
    every = itertools.chain(groups.staying, *(group.parameters for group in groups.placed))
    block = block_bytes(profile.device)
    scalars = 2 + during * sum(p.requires_grad for p in every)
    small = scalars * rounded(8, block) + checksum_bytes(block)
    return groups.staying_bytes + profile.batch_bytes + small


def _constant(profile: Profile, request: Request, groups: FoundGroups) -> int:
    """Bytes that the machine does not charge, at most."""
    step = profile.unmanaged_bytes + profile.snapshot_bytes + profile.replay_bytes * request.replays
    return _beside(profile, groups, when(request) == "during") + step - profile.resident_input_bytes


def _step_levels(profile: Profile, groups: FoundGroups, plan: ExecutionPlan) -> list[int]:
    """The expected bytes of each operation, of all that the device holds. On CUDA they are those that the machine
    charges, since gradients may stay longer while a thread of the host updates."""
    levels = expected_levels if profile.device.type == "cpu" else simulated_levels
    beside = _beside(profile, groups, plan.placed is not None and plan.placed.during)
    return [level + beside for level in levels(profile, plan)]


def plan_groups(profile: Profile, request: Request, groups: FoundGroups, asked: int) -> ExecutionPlan | None:
    """A plan of `groups` within `asked` bytes in all; None if none was found. Short searches tell how much of them the
    machine does not charge."""
    short = request.shortened()
    plans = list(_plans(profile, short, groups, asked))
    found = [plan for plan, _ in plans if _peak(plan) <= asked]
    if short is not request:
        less, tries = (plans[-1][1], LONGER) if found else (0, TRIES)
        longer = itertools.islice(_plans(profile, request, groups, asked, less), tries)
        found += [plan for plan, _ in longer if _peak(plan) <= asked]
    return min(found, key=lambda plan: plan.trace.makespan, default=None)


def _evenly_timed(chain: Chain) -> Chain:
    """`chain` with times that nobody has measured, so that what fits depends on bytes alone: a backward takes twice as
    long as a forward; an update, and the copy of all parameters, as long as a forward."""
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
    rate = float(max(1, sum(group.bytes for group in groups)))
    rates = LinkRates(rate, rate, chain.duplex)._asdict()
    return replace(chain, **rates, stages=tuple(stages), parameters=tuple(groups))


def _peak(plan: ExecutionPlan) -> int:
    assert plan.placed is not None
    return plan.placed.peak_bytes


def _plans(
    profile: Profile, request: Request, groups: FoundGroups, asked: int, less: int = 0, even: bool = False
) -> Iterator[tuple[ExecutionPlan, int]]:
    """Plans of `groups` within `asked` bytes, less `less`, as the machine charges them, until one fits; each with what
    was taken off. If one has a larger peak, so much more is taken off the next. even: solve `_evenly_timed` chains."""
    profile = profile.placing(groups.costs)
    chain = _evenly_timed(profile.chain) if even else profile.with_overhead().chain
    limit = asked - _constant(profile, request, groups) - less
    options = {**request.options, "updates": when(request)}
    if (room := options.get("host_limit")) is not None:
        options["host_limit"] = parse_host_limit(room) - sum(group.nbytes for group in groups.streamed)
        if options["host_limit"] < 0:
            return
    for _ in range(TRIES):
        if limit < min_mem_limit(chain, request.mode, when(request)):
            return
        try:
            sequence = solve(chain, limit, mode=request.mode, mem_slots=request.mem_slots, **options)
        except InfeasibleError:
            return
        plan = _compiled(profile, request, groups, sequence, asked)
        if groups.streamed and _peak(plan) < asked:
            plan = _compiled(profile, request, groups.streaming_less(asked - _peak(plan)), sequence, asked)
        yield plan, less
        if _peak(plan) <= asked:
            return
        less, limit = less + _peak(plan) - asked, limit - (_peak(plan) - asked)


def _reused(
    profile: Profile, request: Request, groups: FoundGroups, near: Several[KnownPlan]
) -> Iterator[ExecutionPlan]:
    """Those of the plans `near` for the same groups that fit `profile`, too."""
    placing = profile.placing(groups.costs)
    forms = [[recipe.identity for recipe in behaviour.forms] for behaviour in placing.behaviours]
    found: dict[Any, tuple[Sequence, tuple[PlacedGroup, ...]]] = {}
    before = {id(parameter) for group in groups.before for parameter in group.parameters}
    for other, plan in near:
        if plan.placed is None or not before.issuperset(id(p) for one in plan.placed.before for p in one.parameters):
            continue
        if _members(plan.chain.parameters, plan.placed.groups) == _members(groups.costs, groups.placed):
            ops = in_forms_of(plan.sequence.ops, other, forms)
            if ops is not None:
                sequence = replace(plan.sequence, ops=ops)
                found[ops, frozenset(sequence.resident), plan.placed.before] = sequence, plan.placed.before
    for sequence, streamed in found.values():
        plan = _compiled(placing, request, replace(groups, streamed=streamed), sequence, request.mem_limit)
        if _peak(plan) <= request.mem_limit:
            yield plan


def _members(costs: Several[ParameterGroup], groups: Several[PlacedGroup]) -> list[tuple[Any, ...]]:
    """What two plans must have in common so that one can take the other's place."""
    rows = zip(costs, groups, strict=True)
    return [(of.stages, of.grad_bytes, of.state_bytes, *map(id, group.parameters)) for of, group in rows]


def _compiled(profile: Profile, request: Request, groups: FoundGroups, sequence: Sequence, asked: int) -> ExecutionPlan:
    """The plan that runs `sequence`, of the chain of `profile` with its `groups` placed, within `asked` bytes."""
    chain, updates = profile.with_overhead().chain, when(request)
    trace = simulate(chain, sequence, updates=updates)
    placed = _placed(profile, chain, groups, sequence, updates == "during")
    plan = compile_placed(chain, sequence, trace, placed)
    placed = replace(placed, levels=_levels(profile, groups, plan, placed))
    room = asked - _constant(profile, request, groups) - _without_parameters(profile, chain, placed)
    return replace(plan, placed=replace(placed, room=max(0, room)))


def _without_parameters(profile: Profile, chain: Chain, placed: PlacedPlan) -> int:
    """Peak of a forward without gradients, without the parameters that it fetches."""
    most = profile.prefix_peak_bytes
    for i, stage in enumerate(chain.stages, start=1):
        own = stage.output_bytes + stage.forward_transient_bytes + (stage.checkpoint_transient_bytes or 0)
        most = max(most, chain.output_bytes(i - 1) + own)
    return most + sum(group_bytes(chain, v) for v in placed.resident)


def _levels(profile: Profile, groups: FoundGroups, plan: ExecutionPlan, placed: PlacedPlan) -> tuple[int, ...]:
    """The expected bytes of each operation. After the backward, a gradient stays for the caller to read, unless the
    host has a copy. On a CPU, the temporaries of the host's updates count, too."""
    levels, staying = _step_levels(profile, groups, plan), 0
    in_turn = 0 if profile.device.type == "cpu" else bytes_in_turn([group.parameters for group in placed.before])
    for n, op in enumerate(plan.sequence):
        if op.kind in FORWARDS and any(profile.outside_bytes[op.stage - 1 : op.stage]):  # may call layers before it
            levels[n] += in_turn
        levels[n] += staying + (groups.first_bytes[op.stage - 1] if op.kind is OpKind.H else 0)
        if op.kind is OpKind.U and op.stage in placed.keep_gradients and not placed.during:
            staying += profile.chain.group(op.stage).grad_bytes
    levels[-1] += groups.outside_update_bytes
    resting = sum(at_rest(profile.chain, plan.sequence, plan.sequence.resident).device.values())
    before = profile.prefix_peak_bytes + in_turn + resting + _beside(profile, groups, placed.during)
    return max(levels[0], before), *levels[1:]


def _placed(profile: Profile, chain: Chain, groups: FoundGroups, sequence: Sequence, during: bool) -> PlacedPlan:
    """The placement of parameters that `sequence` implies. Unless the device is a CPU, a parameter lies where its
    gradient arrives: on the host, if the host updates it or receives the gradient."""
    numbers = frozenset(range(1, len(chain.parameters) + 1))
    rest = at_rest(chain, sequence.ops, sequence.resident)
    resident = frozenset(rest.device)
    keep = numbers - {op.stage for op in sequence if op.kind is OpKind.OFFLOAD and op.of == "g"}
    early: frozenset[Value] = frozenset()
    if apart := is_accelerator(profile.device):
        on_host = {op.stage for op in sequence if op.kind is OpKind.H} | (numbers - keep)
        early = frozenset(v for v in resident if v.of == "w" and v.stage in on_host)
        keep &= {v.stage for v in resident - early if v.of == "w"}
    moved = numbers - {v.stage for v in resident - early if v.of == "w"}
    return PlacedPlan(
        groups=groups.placed,
        resident=resident - early,
        on_both=(resident - early) & frozenset(rest.host),
        moved=moved | {op.stage for op in sequence if op.of == "w"},
        keep_gradients=keep,
        early=early,
        outside=groups.staying,
        during=during,
        before=groups.streamed,
        on_host=all(one.host_update_time is not None for one in groups.costs if one.grad_bytes) or not apart,
    )


def _floor(profile: Profile, request: Request, groups: FoundGroups) -> int:
    """The bytes of the operation that needs the most."""
    chain = profile.placing(groups.costs).chain
    return min_mem_limit(chain, request.mode, when(request)) + _constant(profile, request, groups)


def _smallest(profile: Profile, request: Request, found: Several[FoundGroups], whole: int) -> ExecutionPlan:
    """The plan for the smallest limit for which one was found without regard to times.

    Raises:
        InfeasibleError: if this limit is above the request's. whole: a limit at which all fits.
    """
    least: tuple[int, ExecutionPlan | None] = whole, None
    quick = _quick(request)
    for groups in found:
        limit = _floor(profile, request, groups)
        more = max(1, limit // 50)
        while limit < least[0]:
            plans = [plan for plan, _ in _plans(profile, quick, groups, limit, even=True)]
            best = min(plans, key=_peak, default=None)
            if best is not None and _peak(best) <= limit:
                least = limit, best
                break
            limit, more = max(limit + more, 0 if best is None else _peak(best)), 2 * more
    limit, plan = least
    if plan is None or limit > request.mem_limit:
        raise InfeasibleError(
            "the training step with its parameters, gradients and optimizer states needs at least"
            f" {format_bytes(limit)} ({limit} bytes) {request}; the device_limit is"
            f" {format_bytes(request.mem_limit)} ({request.mem_limit} bytes){_CASTS if profile.cast_again else ''}",
            limit,
        )
    return plan


def _report(request: Request, plan: ExecutionPlan, seconds: float) -> None:
    trace, placed = plan.trace, plan.placed
    assert placed is not None
    resident = sum(v.of == "w" for v in placed.resident)
    logger.info(
        "rotoff: planned %s in %.1f s, device_limit %s, predicted peak %s, step %.4g s; the parameters of %d of %d"
        " groups lie on the device between steps, %s come in and %s go out in each; %s",
        request,
        seconds,
        format_bytes(request.mem_limit),
        format_bytes(placed.peak_bytes),
        trace.makespan,
        resident,
        len(placed.groups),
        format_bytes(trace.h2d_bytes),
        format_bytes(trace.d2h_bytes),
        in_words(plan.sequence),
    )
