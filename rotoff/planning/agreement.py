"""All processes of a group follow one plan, which covers what each of them recorded.

Each process records its own step. The common chain has the largest of each cost. The first process plans; what a
sequence holds it asks all of them, since each judges it on its own step. All processes must call these functions
together. An error is exchanged like a result, so that none waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from typing import Any, TypeVar
from zlib import crc32

import torch.distributed as dist

from ..core.chain import Chain, Form, LinkRates, Stage
from ..core.sequence import Sequence
from ..errors import InfeasibleError, MeasureError
from ..profile.checkpointed import plain_levels
from ..profile.tape_chain import TapeChain
from ..profile.tape_groups import TapeGroups
from ..profile.tape_profile import TapeProfile
from ..runtime.execution_plan import compile_sequence
from .distributed import from_everyone
from .request import Request
from .step_planner import StepPlan, least_limit, make_plan
from .tape_placed_planner import Found

T = TypeVar("T")
APART = (
    "the processes of the group plan together: in compute_sequence once a step is recorded, in min_mem_limit, and in"
    " the next training step; ask after that"
)


def everywhere(here: bool, group: Any) -> bool:
    """Whether it is so in all processes. group: None for this one alone."""
    return here if group is None else all(from_everyone(lambda: here, "plan", group))


def together(run: Callable[[], T], group: Any) -> T:
    """Return this process's result of `run`, a step that is recorded, once it has succeeded in all processes.

    Raises:
        MeasureError: if it raises in another process. Whatever it raises here.
    """
    if group is None:
        return run()
    found: list[T] = []
    from_everyone(lambda: found.append(run()), "measure the model", group)
    return found[0]


def agree_on_rates(measure: Callable[[], LinkRates], group: Any) -> LinkRates:
    """Return the smallest rates of any process's link, measured while all of them copy, as they do in training."""
    if group is None:
        return measure()
    everywhere(True, group)
    return reduce(LinkRates.at_most, from_everyone(measure, "measure the link", group))


@dataclass(frozen=True, eq=False)
class CommonChain(TapeChain):
    """The largest costs of all processes; the contents are those of this one.

    own: this process's chain. number: of the chain among those of the profile.
    """

    own: TapeChain
    number: int
    group: Any

    def levels(self, sequence: Sequence) -> list[int]:
        """Return the most bytes that each operation holds in any process. The first process asks; the others answer
        in `decided`."""
        self.own.levels(sequence)  # if it is refused here, nobody is asked
        _tell(self.group, ("levels", self.number, sequence.to_dict()))
        return self.common_levels(sequence)

    def common_levels(self, sequence: Sequence) -> list[int]:
        return _most_levels(lambda: self.own.levels(sequence), self.group)


@dataclass(frozen=True, eq=False, kw_only=True)
class CommonGroups(TapeGroups):
    """Groups with the largest costs of all processes, whose levels are those of all.

    own: the same, with the levels of this process. number: among those of the step.
    """

    own: TapeGroups
    number: int
    group: Any

    def levels(self, sequence: Sequence, during: bool) -> list[int]:
        """Return the most bytes that each operation holds in any process, as `CommonChain.levels` does."""
        self.own.levels(sequence, during)
        _tell(self.group, ("levels", self.number, sequence.to_dict(), during))
        return self.common_levels(sequence, during)

    def common_levels(self, sequence: Sequence, during: bool) -> list[int]:
        return _most_levels(lambda: self.own.levels(sequence, during), self.group)


@dataclass(frozen=True, eq=False)
class CommonProfile(TapeProfile):
    """This process's profile, for plans that hold in all processes of `group`.

    costs: of each chain, the largest of all processes. plain: the most bytes of the model as it is, and between its
    forward and its backward.
    """

    group: Any = None
    costs: tuple[Chain, ...] = ()
    plain: tuple[int, int] = (0, 0)
    own: list[TapeChain] = field(default_factory=list)

    @cached_property
    def chains(self) -> list[TapeChain]:
        return [
            CommonChain(
                **{part.name: getattr(own, part.name) for part in fields(TapeChain) if part.name != "chain"},
                chain=costs,
                own=own,
                number=number,
                group=self.group,
            )
            for number, (own, costs) in enumerate(zip(self.own, self.costs, strict=False))
        ]

    def keep_all_bytes(self, in_flight: int = 1) -> int:
        return self.plain[0] + (in_flight - 1) * self.plain[1]


def common_profile(profile: TapeProfile, group: Any) -> TapeProfile:
    """Return the profile with the costs of all processes; `profile` itself without a group.

    Raises:
        MeasureError: if the processes have different numbers of stages.
    """
    if group is None:
        return profile
    cut = alike_cut(profile, group)
    own, plain = cut.chains, plain_levels(profile.trace)
    everyone = from_everyone(lambda: ([one.chain for one in own], plain), "plan", group)
    costs = _largest_of([chains for chains, _ in everyone])
    most = max(one for _, (one, _) in everyone), max(one for _, (_, one) in everyone)
    here = {one.name: getattr(cut, one.name) for one in fields(TapeProfile)}
    return CommonProfile(**here, group=group, costs=tuple(costs), plain=most, own=own)


def alike_cut(profile: TapeProfile, group: Any) -> TapeProfile:
    """Return this process's profile with the cuts of all, and the largest batch."""
    if group is None:
        return profile
    course = crc32(repr([(op.module, op.at) for op in profile.trace.ran]).encode())
    told = from_everyone(lambda: (course, profile.batch_bytes, profile.cuts[0]), "plan", group)
    same = all(other == told[0][0] for other, _, _ in told)
    begins = (told[0][2],) if same else profile.begins  # cuts depend on bytes, and batches may be unequal
    here = {one.name: getattr(profile, one.name) for one in fields(TapeProfile)}
    return TapeProfile(**here | {"batch_bytes": max(nbytes for _, nbytes, _ in told), "begins": begins})


def common_groups(make: Callable[[], list[TapeGroups]], group: Any) -> list[TapeGroups]:
    """Return the groups of a step, which `make` returns, with the costs of all processes; as they are without a group.

    Raises:
        MeasureError: if the processes have different numbers of stages or groups.
    """
    if group is None:
        return make()
    costs, ways = ("beside", "marks", "update", "whole", "expected"), list[TapeGroups]()

    def told() -> list[tuple[Chain, dict[str, int]]]:
        ways.extend(make())
        return [(one.chain, {name: getattr(one, name) for name in costs}) for one in ways]

    everyone = from_everyone(told, "plan", group)
    chains = _largest_of([[chain for chain, _ in here] for here in everyone])
    most = [{name: max(one[name] for _, one in several) for name in costs} for several in zip(*everyone, strict=False)]
    own = [replace(one, chain=chain, **largest) for one, chain, largest in zip(ways, chains, most, strict=False)]
    names = [one.name for one in fields(TapeGroups)]
    return [
        CommonGroups(**{name: getattr(one, name) for name in names}, own=one, number=number, group=group)
        for number, one in enumerate(own)
    ]


def own_of(groups: TapeGroups) -> TapeGroups:
    """Return the groups with the levels of this process."""
    return groups.own if isinstance(groups, CommonGroups) else groups


def _largest_of(everyone: Several[Several[Chain]]) -> list[Chain]:
    """Return the chains with the largest costs, given those of each process."""
    for what, many in (("stages", len), ("groups of parameters", lambda chain: len(chain.parameters))):
        counts = [many(chains[0]) for chains in everyone]
        if len(set(counts)) > 1:
            raise MeasureError(
                f"the processes of the group have different numbers of {what} ({', '.join(map(str, counts))}), and one"
                " plan cannot be for all; give all of them the same model and inputs of the same kind, or name the"
                " stages by stages="
            )
    return [_largest(several) for several in zip(*everyone, strict=False)]


def _most_levels(levels: Callable[[], list[int]], group: Any) -> list[int]:
    return [max(one) for one in zip(*from_everyone(levels, "judge a plan", group), strict=True)]


def _largest(chains: Several[Chain]) -> Chain:
    """Return the chain with the largest costs of all."""
    stages = zip(*(chain.stages for chain in chains), strict=True)
    groups = zip(*(chain.parameters for chain in chains), strict=True)
    costs = "bytes", "grad_bytes", "state_bytes", "update_time", "update_transient_bytes"
    return replace(
        chains[0],
        stages=tuple(map(_largest_stage, stages)),
        parameters=tuple(replace(several[0], **_most(several, costs)) for several in groups),
        **_most(chains, ("input_bytes", "input_grad_bytes")),
    )


def _largest_stage(stages: Several[Stage]) -> Stage:
    forms = zip(*(stage.forms for stage in stages), strict=False)  # those that all have
    names = [one.name for one in fields(Stage) if one.name not in ("name", "forms", "extra", "tail_time")]
    parts = [one.name for one in fields(Form) if one.name != "extra"]
    return replace(
        stages[0],
        tail_time=min(stage.tail_time for stage in stages),
        forms=tuple(Form(**_most(several, parts)) for several in forms),
        **_most(stages, names),
    )


def _most(of: Several[Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: max(getattr(one, name) for one in of) for name in names}


def agree_on_plan(profile: TapeProfile, request: Request, near: Iterable[Sequence], room: int | None) -> StepPlan:
    """Return the first process's plan; by `make_plan` without a group.

    Raises:
        InfeasibleError: in all processes, if nothing fits. MeasureError: if the first process fails otherwise.
    """
    if not isinstance(profile, CommonProfile):
        return make_plan(profile, request, near, room)

    def decide() -> tuple[Any, ...]:
        plan = make_plan(profile, request, near, room)
        number = profile.chains.index(plan.found)
        return number, plan.sequence.to_dict(), plan.execution.keeps_all, plan.levels, plan.peak

    number, told, keeps_all, levels, peak = decided(decide, profile.chains, profile.group)
    found, sequence = profile.chains[number], Sequence.from_dict(told)
    execution = compile_sequence(found.chain, sequence, in_flight=request.in_flight)
    return StepPlan(profile, found, replace(execution, keeps_all=keeps_all), levels, peak)


def agree_on_least(profile: TapeProfile, request: Request) -> int:
    """Return the smallest limit that a request can have in all processes."""

    def decide() -> int:
        return least_limit(profile, request)

    return decided(decide, profile.chains, profile.group) if isinstance(profile, CommonProfile) else decide()


def agree_on_placed(
    ways: list[TapeGroups], during: bool, choose: Callable[[], Found], group: Any
) -> tuple[Found, list[int] | None]:
    """Return what the first process chooses of `ways`, and its levels; without a group what `choose` does. during:
    whether updates come in the backward.

    Raises:
        InfeasibleError: in all processes, if nothing fits. MeasureError: if the first process fails otherwise.
    """
    if group is None:
        return choose(), None

    def decide() -> tuple[int, dict[str, Any], list[int]]:
        groups, sequence = choose()
        assert isinstance(groups, CommonGroups)
        return groups.number, sequence.to_dict(), groups.levels(sequence, during)

    number, told, levels = decided(decide, ways, group)
    return (own_of(ways[number]), Sequence.from_dict(told)), levels


def decided(decide: Callable[[], T], asked: Several[Any], group: Any) -> T:
    """Return the first process's result of `decide`, which asks all processes for the levels of sequences: those of one
    in `asked`. Only one process solves, since the result of a timed search may vary."""
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
            asked[number].common_levels(Sequence.from_dict(sequence), *how)
        except Exception:  # the first process fails too, and says so
            continue


def _tell(group: Any, told: Any) -> Any:
    """Return what the first process tells."""
    box = [told]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]
