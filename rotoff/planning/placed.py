"""Plans under one limit for all that the device holds: parameters, gradients, optimizer states, the batch and the
step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from torch.optim import Optimizer

from ..core.chain import Chain
from ..core.sequence import OpKind, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..core.steady_step import at_rest
from ..core.trace import Trace
from ..errors import InfeasibleError
from ..profile.optimizer_probe import OptimizerProbe
from ..profile.parameter_groups import FoundGroups, find_groups
from ..profile.profile import Profile
from ..report.summary import in_words
from ..runtime.execution_plan import ExecutionPlan, compile_placed
from ..runtime.placed.placement import PlacedPlan
from ..solver import solve
from ..solver.bounds import min_mem_limit
from .planner import Request, plan_everything, reported_bytes

logger = logging.getLogger("rotoff")
TRIES = 4  # plans asked for, each with less memory, until what the machine does not charge fits too


@dataclass(frozen=True)
class PlacedPlanner:
    """Plans for `model` and what `optimizers` keep of it, where a request's limit is all that the device may hold."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]

    def __call__(self, profile: Profile, request: Request) -> ExecutionPlan:
        """The fastest plan found within the request's limit.

        Raises:
            InfeasibleError: where nothing fits; `min_mem_limit` is the smallest limit that works.
        """
        began = time.perf_counter()
        whole = self.keep_all_bytes(profile)
        if whole <= request.mem_limit:
            return plan_everything(profile, plain=True)
        found = [self.groups(profile, host) for host in (False, True)]
        for groups in found:
            plan = plan_groups(profile, request, groups, request.mem_limit)
            if plan is not None:
                _report(request, plan, profile, time.perf_counter() - began)
                return plan
        least = min(whole, _least(profile, request, found, whole))
        raise InfeasibleError(
            f"the training step with its parameters, gradients and optimizer states needs at least {format_bytes(least)} ({least} bytes)"
            f" {request}; the device_limit is {format_bytes(request.mem_limit)} ({request.mem_limit} bytes)",
            least,
        )

    def groups(self, profile: Profile, host: bool) -> FoundGroups:
        """The model's groups of parameters; host: whether the host may update them."""
        return find_groups(self.model, profile.stages, self._probe, host)

    def keep_all_bytes(self, profile: Profile) -> int:
        """The limit at which nothing has to be done: the plain model's step, and the optimizer's."""
        groups = self.groups(profile, host=False)
        step = reported_bytes(profile, plan_everything(profile, plain=True)) + profile.resident_input_bytes
        update = sum(group.update_transient_bytes for group in groups.costs) + groups.outside_update_bytes
        return groups.all_bytes + max(step, update)

    @cached_property
    def _probe(self) -> OptimizerProbe:
        return OptimizerProbe(self.optimizers)


def _constant(profile: Profile, request: Request, groups: FoundGroups) -> int:
    """Bytes on the device throughout that the machine does not know of."""
    return (
        groups.outside_bytes + profile.unmanaged_bytes + profile.snapshot_bytes + profile.replay_bytes * request.replays
    )


def plan_groups(profile: Profile, request: Request, groups: FoundGroups, asked: int) -> ExecutionPlan | None:
    """A plan of `groups` within `asked` bytes in all; None where none was found."""
    chain = replace(profile.chain, parameters=groups.costs)
    constant = _constant(profile, request, groups)
    limit = room = asked - constant
    for _ in range(TRIES):
        if limit < min_mem_limit(chain, request.mode, "after"):
            return None
        options = {**request.options, "updates": "after"}
        try:
            sequence = solve(chain, limit, mode=request.mode, mem_slots=request.mem_slots, **options)
        except InfeasibleError:
            return None
        trace = simulate(chain, sequence, updates="after")
        peak = max(trace.peak_bytes, _after_backward(chain, groups, sequence, trace))
        if peak <= room:
            return _compiled(profile, chain, groups, sequence, trace, peak + constant)
        limit -= peak - room
    return None


def _after_backward(chain: Chain, groups: FoundGroups, sequence: Sequence, trace: Trace) -> int:
    """The most that the updates hold. A gradient stays for the caller to look at, unless the host has it, too; the
    host's updates take from the device what they make for a time."""
    left = {op.stage for op in sequence if op.kind is OpKind.OFFLOAD and op.of == "g"}
    staying = most = 0
    last = max((op.kind is OpKind.B, n) for n, op in enumerate(sequence))[1]
    for event in trace.events[last:]:
        k = event.op.stage
        more = groups.first_bytes[k - 1] if event.op.kind is OpKind.H else 0
        most = max(most, event.memory + staying + more)
        if event.op.kind is OpKind.U and k not in left:
            staying += chain.group(k).grad_bytes
    return most + groups.outside_update_bytes


def _compiled(
    profile: Profile, chain: Chain, groups: FoundGroups, sequence: Sequence, trace: Trace, peak: int
) -> ExecutionPlan:
    rest = at_rest(chain, sequence.ops, sequence.resident)
    placed = PlacedPlan(
        groups=groups.placed,
        resident=frozenset(rest.device),
        on_both=frozenset(rest.device) & frozenset(rest.host),
        moved=frozenset(range(1, len(chain.parameters) + 1)) - {v.stage for v in rest.device if v.of == "w"}
        | {op.stage for op in sequence if op.of == "w"},
        peak_bytes=peak,
    )
    return compile_placed(chain, sequence, trace, placed, profile.tail_times)


def _least(profile: Profile, request: Request, found: Several[FoundGroups], whole: int) -> int:
    """The smallest limit for which a plan was found; `whole`: at which nothing has to be done."""
    limits = []
    quick = replace(request, options={**request.options, "refine": False})
    for groups in found:
        chain = replace(profile.chain, parameters=groups.costs)
        constant = _constant(profile, request, groups)
        limit = min_mem_limit(chain, request.mode, "after") + constant
        for _ in range(TRIES):
            if plan_groups(profile, quick, groups, limit) is not None:
                limits.append(limit)
                break
            limit += max(1, limit // 50)
    return min(limits, default=whole)


def _report(request: Request, plan: ExecutionPlan, profile: Profile, seconds: float) -> None:
    trace, placed = plan.trace, plan.placed
    assert placed is not None
    resident = sum(v.of == "w" for v in placed.resident)
    logger.info(
        "rotoff: planned %s in %.1f s, device_limit %s, predicted peak %s, step %.4g s; %d of %d groups of parameters resident, %s in and %s"
        " out a step; %s",
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
