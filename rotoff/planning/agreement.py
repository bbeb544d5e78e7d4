"""All processes of a group follow one plan, which covers what each of them recorded.

If stages communicate while they run (sharded parameters are gathered), processes with different plans would wait for
each other forever. Each process records its own step. The common chain has the largest of each cost. The first process
plans; what a sequence holds it asks all of them, since each judges it on its own step.

All processes must call these functions together: each new input signature in the same step. Every exchange is an
all-gather, or a broadcast of the first process; an error is exchanged like a result.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from functools import partial, reduce
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from ..core.chain import LinkRates
from ..core.sequence import Sequence
from ..core.sizes import NO_LIMIT
from ..errors import ExecutionError, InfeasibleError, LimitError, MeasureError, OptionError, RotoffError
from ..profile.checkpointed import plain_levels
from ..profile.tape_groups import TapeGroups
from ..profile.tape_profile import TapeProfile
from ..runtime.links.pinned import room_for_plan
from ..runtime.sharded import Shards, sharded
from .request import Request
from .step_planner import StepPlan, Way, compiled, least_limit

T = TypeVar("T")
ANSWER = 5.0  # seconds in which a process of the group answers, once a collective has failed
TAG = 31_337  # of the message that asks for an answer
APART = (
    "the processes of the group plan together: in compute_sequence once a step is recorded, in min_mem_limit, and in"
    " the next training step; ask after that"
)


def agree_on_limit(mem_limit: Callable[[], int], group: Any) -> int:
    """The smallest result of `mem_limit` in any process, in bytes.

    Raises:
        LimitError: if it raises in another process. Whatever it raises here.
    """
    return min(from_everyone(mem_limit, "take the limit", group, LimitError))


def from_everyone(act: Callable[[], T], what: str, group: Any, error_type: type[RotoffError] = MeasureError) -> list[T]:
    """The results of `act` in all processes; if it fails in one it raises in all, so that none waits forever. group:
    None for this process alone."""
    if group is None:
        return [act()]
    failure: Exception | None = None
    mine: tuple[Any, str] = None, ""
    try:
        mine = act(), ""
    except Exception as error:
        failure, mine = error, (None, f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except RuntimeError as error:
        raise not_answering(error, group) from error
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(everyone):
        if reason:
            raise error_type(f"process {rank} of the group could not {what}, and so none of them can; there: {reason}")
    return [result for result, _ in everyone]


def room_of(device: Any, group: Any = None) -> int | None:
    """Return the fewest free bytes of the host in any process of the group; None if none of them is known."""

    def room_here() -> int:
        room = room_for_plan(device)
        return NO_LIMIT if room is None else room

    least = agree_on_limit(room_here, group)
    return None if least >= NO_LIMIT else least


def everywhere(here: bool, group: Any) -> bool:
    """Whether it is so in all processes."""
    return all(from_everyone(lambda: here, "plan", group))


def together(run: Callable[[], T], what: str, group: Any) -> T:
    """Return this process's result of `run` once it has succeeded in all processes. what: it does, for messages.

    Raises:
        MeasureError: if it raises in another process. Whatever it raises here.
    """
    found: list[T] = []
    from_everyone(lambda: found.append(run()), what, group)
    return found[0]


def agree_on_rates(measure: Callable[[], LinkRates], group: Any) -> LinkRates:
    """Return the smallest rates of any process's link, measured while all of them copy, as they do in training."""
    everywhere(True, group)
    return reduce(LinkRates.at_most, from_everyone(measure, "measure the link", group))


def _levels_of_all(own: Any, number: int, group: Any, sequence: Sequence, *how: Any) -> list[int]:
    """Return the most bytes that each operation holds in any process. The first process asks; the others answer in
    `decided`. own: the chain, or the groups, of this one. number: among those of the step."""
    if dist.get_rank(group) == 0:
        own.levels(sequence, *how)  # if it is refused here, nobody is asked
        _tell(group, ("levels", number, sequence.to_dict(), *how))
    everyone = from_everyone(lambda: own.levels(sequence, *how), "judge a plan", group)
    return [max(one) for one in zip(*everyone, strict=True)]


def common_profile(profile: TapeProfile, group: Any) -> TapeProfile:
    """Return the profile with the costs of all processes; `profile` itself without a group.

    Raises:
        MeasureError: if the processes have different numbers of stages.
    """
    if group is None:
        return profile
    cut = alike_cut(profile, group)
    plain = from_everyone(lambda: plain_levels(profile.trace), "plan", group)
    most, resting, loss = map(max, zip(*plain, strict=True))
    return replace(cut, plain=(most, resting, loss), common=tuple(_common(lambda: cut.chains, ("chain",), group)))


def alike_cut(profile: TapeProfile, group: Any) -> TapeProfile:
    """Return this process's profile with the cuts of all, and the largest batch."""
    if group is None:
        return profile
    course = crc32(repr([(op.module, op.at) for op in profile.trace.ran]).encode())
    told = from_everyone(lambda: (course, profile.batch_bytes, profile.cuts[0]), "plan", group)
    same = all(other == told[0][0] for other, _, _ in told)
    begins = (told[0][2],) if same else profile.begins  # cuts depend on bytes, and batches may be unequal
    batch_bytes = max(nbytes for _, nbytes, _ in told)
    return replace(profile, batch_bytes=batch_bytes, begins=begins, common=(), plain=None)


def common_groups(make: Callable[[], list[TapeGroups]], group: Any) -> list[TapeGroups]:
    """Return the groups of a step, which `make` returns, with the costs of all processes; as they are without a group.

    Raises:
        MeasureError: if the processes have different numbers of stages or groups.
    """
    if group is None:
        return make()
    return _common(make, ("chain", "beside", "update", "whole", "expected"), group)


def _common(make: Callable[[], list[Any]], costs: Several[str], group: Any) -> list[Any]:
    """Return the ways to plan a step, which `make` returns, with the largest of these `costs` in any process."""
    ways = list[Any]()

    def told() -> list[tuple[Any, ...]]:
        ways.extend(make())
        return [tuple(getattr(one, name) for name in costs) for one in ways]

    alike = list(zip(*from_everyone(told, "plan", group), strict=False))
    for what, many in (("stages", len), ("groups of parameters", lambda chain: len(chain.parameters))):
        counts = next((c for several in alike if len(set(c := [many(chain) for chain, *_ in several])) > 1), None)
        if counts is not None:
            raise MeasureError(
                f"the processes of the group have different numbers of {what} ({', '.join(map(str, counts))}), and one"
                " plan cannot be for all; give all of them the same model and inputs of the same kind, or name the"
                " stages by stages="
            )
    return [
        replace(one, **dict(zip(costs, _largest(of), strict=True)), ask=partial(_levels_of_all, one, number, group))
        for number, (one, of) in enumerate(zip(ways, alike, strict=False))
    ]


def _largest(several: Several[Any]) -> Any:
    """Return the first of several costs, chains or parts of one, with the largest of all."""
    first = several[0]
    if isinstance(first, tuple):  # of forms those that all have
        return tuple(map(_largest, zip(*several, strict=False)))
    if not is_dataclass(first):
        return max(several) if isinstance(first, (int, float)) else first
    costs = {one.name: [getattr(of, one.name) for of in several] for one in fields(first)}
    largest = {name: min(of) if name == "tail_time" else _largest(of) for name, of in costs.items()}
    return replace(first, **largest)  # type: ignore[type-var]


def agree_on_plan(
    profile: TapeProfile,
    request: Request,
    ways: Several[Way],
    make: Callable[[], StepPlan],
    group: Any,
) -> StepPlan:
    """Return the plan, in one of `ways`, that the first process makes, for this one; what `make` does without a group.

    Raises:
        InfeasibleError: in all processes, if nothing fits. MeasureError: if the first process fails otherwise.
    """
    if group is None:
        return make()

    def decide() -> tuple[Any, ...]:
        plan = make()
        return ways.index(plan.found), plan.sequence.to_dict(), plan.keeps_all, plan.levels, plan.peak

    number, told, keeps_all, levels, peak = decided(decide, ways, group)
    plan = compiled(profile, ways[number], Sequence.from_dict(told), request, levels)
    if keeps_all:
        plan = replace(plan, execution=replace(plan.execution, keeps_all=True, placed=None), peak=peak)
    return plan


def agree_on_least(profile: TapeProfile, request: Request, group: Any) -> int:
    """Return the smallest limit that a request can have in all processes."""

    return decided(lambda: least_limit(profile, request), profile.chains, group)


def decided(decide: Callable[[], T], asked: Several[Any], group: Any) -> T:
    """Return the first process's result of `decide`, which asks all processes for the levels of sequences: those of one
    in `asked`. Only one process solves, since the result of a timed search may vary."""
    if group is None:
        return decide()
    if dist.get_rank(group) == 0:
        try:
            found = decide()
        except InfeasibleError as error:
            _tell(group, ("infeasible", str(error), error.min_mem_limit))
            raise
        except BaseException as error:
            _tell(group, ("failed", repr(error)))
            raise
        _tell(group, ("found", found))
        return found
    while True:
        kind, *told = _tell(group, None)
        if kind == "found":
            return told[0]
        if kind == "infeasible":
            raise InfeasibleError(*told)
        if kind == "failed":
            raise MeasureError(f"the first process of the group could not plan: {told[0]}")
        number, sequence, *how = told
        try:
            asked[number].ask(Sequence.from_dict(sequence), *how)
        except Exception:  # the first process fails too, and says so
            continue


def _tell(group: Any, told: Any) -> Any:
    """Return what the first process tells."""
    box = [told]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def shards_of(model: nn.Module, group: Any) -> Shards | None:
    """The shards of a model that several processes train with a `device_limit`; None for one process.

    Raises:
        OptionError: if each process has the whole model.
    """
    if "" not in sharded(model):
        if group is None and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        raise OptionError(
            "device_limit in several processes is for parameters that FSDP2 shards: call fully_shard on every block and"
            " on the Checkpointable before compute_sequence (with a mesh of (processes, 1), each has a whole copy, as"
            " with DDP); for tensor parallel models give a mem_limit"
        )
    if group is None:
        raise OptionError(
            "device_limit with FSDP2 needs one plan for all processes; make the model by Checkpointable(model,"
            " process_group=True)"
        )
    return Shards(model)


def not_answering(error: BaseException, group: Any) -> ExecutionError:
    """What to raise if a collective has failed: it names the processes of the group that have ended, or else those that
    do not answer."""
    ended, late = list[str](), list[str]()
    asks = "cpu:" in dist.get_backend_config(group)
    for peer in range(dist.get_world_size(group) if asks else 0):
        if peer == dist.get_rank(group):
            continue
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=peer, tag=TAG)
            arriving = dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=TAG)
            assert arriving is not None
            arriving.wait(timedelta(seconds=ANSWER))
        except RuntimeError as reason:
            (late if "imed out" in str(reason) else ended).append(str(peer))
    names = " and ".join(ended or late)
    who = f"process {names} of the group {'has ended' if ended else 'does not answer'}" if names else str(error)
    return ExecutionError(
        f"a collective of this step has failed ({who}); see what that process says, and start all of them again"
    )
