"""One plan for all processes of a group: the costliest of what each measured, the tightest limit, one process's sequence.

Where stages communicate while they run (sharded parameters are gathered), processes that followed different plans would wait
for each other forever. Processes must come here together: each new input signature in the same step of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn

from ..capture.sharding import shards
from ..capture.stage import StageModule
from ..chain import Chain, Form, Stage
from ..errors import InfeasibleError, LimitError, MeasureError, RotoffError
from ..profile.model_profile import Profile
from ..profile.plain_bytes import Lingering, Passing
from ..profile.provenance import TAIL_TIMES
from ..profile.skips import Skip
from ..sequence import Sequence as Plan

T = TypeVar("T")
Identity = tuple[tuple[int, ...], str]  # of a form: `Recipe.identity`
_BYTES = (
    "output_bytes",
    "saved_bytes",
    "grad_bytes",
    "forward_transient_bytes",
    "checkpoint_transient_bytes",
    "backward_transient_bytes",
)
_SECONDS = ("forward_time", "backward_time")
_CONSTANTS = ("stuck_bytes", "replay_bytes", "prefix_peak_bytes")


class _Costs(NamedTuple):
    """What a process tells the others of its profile. forms: of each stage, which ones it found."""

    chain: Chain
    constants: dict[str, int]
    tail_times: tuple[float, ...]
    forms: list[list[Identity]]
    skips: tuple[Skip, ...]
    gone_bytes: tuple[int, ...]
    passing: tuple[Passing, ...]
    lingering: tuple[Lingering, ...]


def agree_on_profile(measure: Callable[[], Profile], group: Any) -> Profile:
    """What `measure` gives here, with the largest bytes and times of all processes, and the smallest bandwidths.

    Raises:
        MeasureError: where the processes have different stages, or another one could not measure. What `measure` raises here.
    """
    found: list[Profile] = []

    def costs() -> _Costs:
        found.append(one := measure())
        forms = [[recipe.identity for recipe in behaviour.forms] for behaviour in one.behaviours]
        constants = {name: getattr(one, name) for name in _CONSTANTS}
        return _Costs(one.chain, constants, one.tail_times, forms, one.skips, one.gone_bytes, one.passing, one.lingering)

    everyone = _from_everyone(costs, "measure the model", group)
    profile = found[0]
    chains = [theirs.chain for theirs in everyone]
    names = [[stage.name for stage in chain.stages] for chain in chains]
    if any(other != names[0] for other in names):
        raise MeasureError(
            f"the processes measured different stages ({names}); give all of them the same model and inputs of the same kind"
        )
    chain = replace(
        chains[0],
        stages=tuple(_largest(stages) for stages in zip(*(chain.stages for chain in chains), strict=True)),
        d2h_bandwidth=min(chain.d2h_bandwidth for chain in chains),
        h2d_bandwidth=min(chain.h2d_bandwidth for chain in chains),
        input_bytes=max(chain.input_bytes for chain in chains),
        input_grad_bytes=max(chain.input_grad_bytes for chain in chains),
    )
    constants: dict[str, Any] = {name: max(theirs.constants[name] for theirs in everyone) for name in _CONSTANTS}
    # a skip of other bytes elsewhere could be taken off the chain by too much, and so could what the plain model lets go of
    skips = profile.skips if all(theirs.skips == profile.skips for theirs in everyone) else ()
    constants["passing"] = profile.passing if all(theirs.passing == profile.passing for theirs in everyone) else ()
    constants["lingering"] = max((theirs.lingering for theirs in everyone), key=lambda held: sum(one.nbytes for one in held))
    constants["gone_bytes"] = tuple(map(min, zip(*(theirs.gone_bytes for theirs in everyone), strict=True)))
    tails = tuple(map(min, zip(*(theirs.tail_times for theirs in everyone), strict=True)))  # what all of them spare
    chain = replace(chain, meta={**chain.meta, TAIL_TIMES: list(tails)})
    # gradients lie where they were made
    agreed = replace(profile, chain=chain, skips=skips, tail_times=tails, compact=None, **constants)
    return _with_common_forms(agreed, chains, [theirs.forms for theirs in everyone])


def _with_common_forms(profile: Profile, chains: list[Chain], found: list[list[list[Identity]]]) -> Profile:
    """`profile` with the forms that all processes found, at the largest costs of any; `found`: which ones each did."""
    stages, behaviours = list(profile.chain.stages), list(profile.behaviours)
    for n, behaviour in enumerate(behaviours):
        common = [recipe for recipe in behaviour.forms if all(recipe.identity in theirs[n] for theirs in found)]
        forms = []
        for recipe in common:
            same = [c.stages[n].forms[theirs[n].index(recipe.identity)] for c, theirs in zip(chains, found, strict=True)]
            costs = [f.name for f in fields(Form) if f.compare]
            forms.append(Form(**{name: max(getattr(form, name) for form in same) for name in costs}))
        stages[n] = replace(stages[n], forms=tuple(forms))
        behaviours[n] = replace(behaviour, forms=tuple(common))
    return replace(profile, chain=replace(profile.chain, stages=tuple(stages)), behaviours=tuple(behaviours))


def agree_on_limit(mem_limit: Callable[[], int], group: Any) -> int:
    """The smallest that `mem_limit` gives in any process, in bytes.

    Raises:
        LimitError: where it raises in another process. What it raises here.
    """
    return min(_from_everyone(mem_limit, "take the limit", group, LimitError))


def agree_on_sequence(solve: Callable[[], Plan], group: Any) -> Plan:
    """What `solve` gives in the first process of the group; it may search for as long as a clock says, so one does it.

    Raises:
        InfeasibleError: in all processes, where the first one's raises it.
    """
    box: list[Any] = [None]
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            box = [solve().to_dict()]
        except InfeasibleError as error:
            box = [(str(error), error.min_mem_limit)]
        except BaseException as error:
            box, failure = [(repr(error), -1)], error
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if isinstance(box[0], dict):
        return Plan.from_dict(box[0])
    message, least = box[0]
    if least < 0:
        raise MeasureError(f"the first process of the group could not plan: {message}")
    raise InfeasibleError(message, least)


def refuse_root_shards(root: nn.Module, stages: Sequence[StageModule]) -> None:
    """Raise where FSDP2 shards parameters by a module around the stages: the backward of one stage alone gives them all up.

    Raises:
        MeasureError: naming such a stage.
    """
    if not any(shards(module) for module in root.modules()):
        return
    for stage in stages:
        for module in stage.modules:
            inside = {id(p) for m in module.modules() if shards(m) for p in m.parameters()}
            if any(id(p) not in inside for p in module.parameters()):
                raise MeasureError(
                    f"the parameters of stage {stage.name!r} are sharded by a module around it; fully_shard each stage with"
                    " parameters, then the rotoff.Checkpointable"
                )


def _from_everyone(act: Callable[[], T], what: str, group: Any, error_type: type[RotoffError] = MeasureError) -> list[T]:
    """What `act` gives in every process; where it fails in one it fails in all, for nobody may wait for who does not come."""
    failure: Exception | None = None
    mine: tuple[Any, str] = None, ""
    try:
        mine = act(), ""
    except Exception as error:
        failure, mine = error, (None, f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(everyone):
        if reason:
            raise error_type(f"process {rank} of the group could not {what}, and so none of them can; there: {reason}")
    return [result for result, _ in everyone]


def _largest(stages: Sequence[Stage]) -> Stage:
    most: dict[str, Any] = {name: max(getattr(stage, name) or 0 for stage in stages) for name in (*_BYTES, *_SECONDS)}
    return replace(stages[0], **most)
