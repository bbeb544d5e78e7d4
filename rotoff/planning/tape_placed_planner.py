"""Plans for a `device_limit`: one limit for parameters, gradients, optimizer states, the batch and the step. The solver
proposes on a chain with groups of parameters, their exact levels decide."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ..core.chain import Chain, LinkRates
from ..core.sequence import Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, OptionError
from ..profile.tape_groups import TapeGroups
from ..profile.tape_profile import TapeProfile
from ..runtime.execution_plan import compile_sequence
from ..runtime.links.pinned import room_for_plan
from ..runtime.placed.updates import parameters_of
from ..solver import keep_all, solve
from ..solver.anneal import CLOSE, Budget, least_compute
from ..solver.bounds import min_mem_limit
from ..solver.search import parse_host_limit
from .request import Request
from .step_planner import StepPlan, charging, first_runs_over

EFFORT = 0.1  # search time / compute time of a step, if training has begun
SHORT = 0.1  # share of the search effort with which a plan is looked for first
AMPLE = 1.25  # limit / bytes of the largest operation, from which on a search finds a plan, whatever the times are
ROUNDS = 6  # solver calls, each for a chain that charges more, or for fewer bytes
CHARGES = 2  # of them after which a chain may charge more

MORE = 1.0, 1.05, 1.2  # than the bytes of the largest operation, in which a plan for the smallest limit is looked for
FEW = 2  # proposals in each


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


def check_updates(optimizers: Several[Optimizer], request: Request) -> None:
    """Raise OptionError if a backward would have to update a parameter by several optimizers."""
    updated = [id(parameter) for one in optimizers for parameter in parameters_of(one)]
    if _during(request) and len(updated) > len({*updated}):
        raise OptionError(
            'a parameter belongs to several optimizers, and updates="during" updates each by one alone; plan with'
            ' updates="after"'
        )


def make_plan(
    profile: TapeProfile, ways: Several[TapeGroups], request: Request, near: Several[StepPlan] = ()
) -> StepPlan:
    """Return the fastest plan that holds at most the request's limit, in one of `ways` to group a step's parameters.
    near: plans of other sizes, one of which is taken if it fits, so that a new size needs no search and moves no
    parameters.

    Raises:
        InfeasibleError: if none does; `min_mem_limit` is the smallest limit for which a plan was found without regard
            to times.
    """
    limit = request.mem_limit
    request = _within_host(ways[0], request)
    reused = [
        compiled(profile, groups, other.sequence, request)
        for other in near
        for groups in ways
        if isinstance(other.found, TapeGroups) and groups.is_like(other.found)
    ]
    if fitting := [one for one in reused if one.peak <= limit]:
        return min(fitting, key=lambda one: one.trace.makespan)
    smallest: StepPlan | None = None
    if limit < AMPLE * min(groups.beside + _floor(groups.chain, request) for groups in ways):
        smallest = _smallest(profile, ways, request)
    if near:  # training has begun, and waits
        refine = EFFORT * ways[0].found.chain.compute_time
        request = replace(request, options={"refine": refine, **request.options})
    effort = SHORT * Budget.of(request.options.get("refine", True)).seconds
    short = replace(request, options={**request.options, "refine": effort or False})
    start = _raced(profile, ways, short)
    if start is None:
        return smallest or _smallest(profile, ways, request)
    if effort and _seconds(start) > CLOSE * least_compute(start.groups.chain):
        longer = _solved(profile, start.groups, request, start.chain, start.asked)
        if longer is not None and longer.plan.peak <= limit:
            return min(start, longer, key=_seconds).plan
    return start.plan


def _seconds(proposal: Proposal) -> float:
    return proposal.plan.trace.makespan


def _raced(profile: TapeProfile, ways: Several[TapeGroups], request: Request) -> Proposal | None:
    """Return a proposal within the request's limit. Only the way with the fastest proposal so far is pursued, since
    what makes a plan smaller makes it slower."""
    rounds = [_proposed(profile, groups, request) for groups in ways]
    latest = {n: one for n, proposals in enumerate(rounds) if (one := next(proposals, None)) is not None}
    while latest:
        n = min(latest, key=lambda n: _seconds(latest[n]))
        if latest[n].plan.peak <= request.mem_limit:
            more = next(rounds[n], latest[n])  # in the bytes that are left
            return min((one for one in (latest[n], more) if one.plan.peak <= request.mem_limit), key=_seconds)
        if (one := next(rounds[n], None)) is None:
            del latest[n]
        else:
            latest[n] = one
    return None


def keeping_all(profile: TapeProfile, groups: TapeGroups) -> StepPlan:
    """Return the plan to run the model as it is."""
    sequence = keep_all(groups.chain, "after")
    execution = replace(compile_sequence(groups.chain, sequence), keeps_all=True)
    levels = (min(level, groups.expected) for level in groups.levels(sequence, False))
    return StepPlan(profile, groups, execution, tuple(levels), groups.expected)


def compiled(
    profile: TapeProfile, groups: TapeGroups, sequence: Sequence, request: Request, levels: Several[int] | None = None
) -> StepPlan:
    """Return the plan that runs `sequence`, which has these `levels`, if they are known."""
    during = _during(request)
    trace = simulate(groups.chain, sequence, updates=_when(request))
    levels = groups.levels(sequence, during) if levels is None else levels
    placed = groups.placement(sequence, during, request.mem_limit)
    execution = compile_sequence(groups.chain, sequence, trace=trace, placed=placed)
    return StepPlan(profile, groups, execution, tuple(levels), max(levels))


class Proposal(NamedTuple):
    """A plan, which was found for `asked` bytes of `chain`: that of its groups, or one that charges some stages with
    more."""

    plan: StepPlan
    groups: TapeGroups
    chain: Chain
    asked: int


def _smallest(profile: TapeProfile, ways: Several[TapeGroups], request: Request) -> StepPlan:
    """Return what holds the fewest bytes of what was found without regard to times.

    Raises:
        InfeasibleError: if this is more than the request's limit, or the host's.
    """
    best = _least(profile, ways, request, request.mem_limit)
    if best is not None and best.peak <= request.mem_limit:
        return best
    host = request.options.get("host_limit")
    anywhere = best or _least(profile, ways, replace(request, options={**request.options, "host_limit": None}))
    least = ways[0].whole if anywhere is None else min(ways[0].whole, anywhere.peak)
    raise InfeasibleError(
        "the training step with its parameters, gradients and optimizer states needs at least"
        f" {format_bytes(least)} ({least} bytes) {request}; the device_limit is"
        f" {format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
        + (f", and nothing was found within host_limit={host!r}" if best is None and host is not None else ""),
        least,
    )


def _least(profile: TapeProfile, ways: Several[TapeGroups], request: Request, enough: int = 0) -> StepPlan | None:
    """Return the plan that holds the fewest bytes, in chains whose times nobody has measured; or the first that holds
    at most `enough`."""
    best: StepPlan | None = None
    whens = ("after", "during")[: 1 + _during(request)]
    modes = ("joint", "offload") if request.mode == "joint" else (request.mode,)
    tried: list[tuple[int, Request, TapeGroups, TapeGroups]] = []
    for when, mode, groups in product(whens, modes, ways):
        quick = replace(request, mode=mode, options={**request.options, "refine": False, "updates": when})
        even = replace(groups, chain=_evenly_timed(groups.chain))
        floor = _floor(even.chain, quick) + even.beside
        tried += [(int(more * floor), replace(quick, mem_limit=int(more * floor)), even, groups) for more in MORE]
    for limit, quick, even, groups in sorted(tried, key=lambda one: one[0]):
        if best is not None and limit >= best.peak:
            break
        for proposed in islice(_proposed(profile, even, quick), FEW):
            one = compiled(profile, groups, proposed.plan.sequence, request)
            best = one if best is None or one.peak < best.peak else best
            if best.peak <= enough:
                return best
    return best


def _within_host(groups: TapeGroups, request: Request) -> Request:
    """`request` with a host limit of at most the free host memory, if that is known."""
    if (room := room_for_plan(groups.device)) is None:
        return request
    if (asked := request.options.get("host_limit")) is not None:
        room = min(room, parse_host_limit(asked))
    return replace(request, options={**request.options, "host_limit": room})


def _during(request: Request) -> bool:
    """Whether the backward updates parameters."""
    return _when(request) == "during"


def _when(request: Request) -> str:
    return str(request.options.get("updates", "after"))


def _floor(chain: Chain, request: Request) -> int:
    """The bytes of the operation that needs the most."""
    return min_mem_limit(chain, request.mode, _when(request))


@lru_cache(maxsize=64)
def _sequence(chain: Chain, limit: int, mode: str, mem_slots: int, options: tuple[tuple[str, Any], ...]) -> Sequence:
    return solve(chain, limit, mode=mode, mem_slots=mem_slots, **dict(options))


def _solved(profile: TapeProfile, groups: TapeGroups, request: Request, chain: Chain, asked: int) -> Proposal | None:
    """Return the plan for so many bytes of `chain`; None if there is none."""
    if asked < _floor(chain, request):
        return None
    options = {**request.options, "updates": _when(request)}
    try:
        sequence = _sequence(chain, asked, request.mode, request.mem_slots, tuple(options.items()))
    except InfeasibleError:  # by the host's limit
        return None
    return Proposal(compiled(profile, groups, sequence, request), groups, chain, asked)


def _proposed(profile: TapeProfile, groups: TapeGroups, request: Request) -> Iterator[Proposal]:
    """Propose plans for the request's limit. Where the first run of a stage exceeds it, the next is for a chain
    that charges the stage with more; elsewhere, and where that has not helped, for fewer bytes; where bytes are left,
    once for more."""
    limit, chain, more = request.mem_limit, groups.chain, True
    asked = limit - groups.beside
    for n in range(ROUNDS):
        if (proposal := _solved(profile, groups, request, chain, asked)) is None:
            return
        yield proposal
        one = proposal.plan
        if one.peak == limit or (one.peak < limit and not more):
            return
        if over := first_runs_over(one.sequence, one.levels, limit) if n < CHARGES else {}:
            chain = charging(chain, over)
        else:
            asked, more = asked + limit - one.peak, False


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
