"""Makes all processes of a group use one profile, the smallest limit, and the first process's plan.

If stages communicate while they run (sharded parameters are gathered), processes with different plans would wait for
each other forever. All processes must call these functions together: each new input signature in the same step. Every
exchange is an all-gather, or a broadcast of the first process; an error is exchanged like a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..capture.sharding import shards
from ..core.sequence import Sequence as Plan
from ..errors import InfeasibleError, LimitError, MeasureError, RotoffError
from ..profile.profile import Profile
from ..tensors.stage import StageModule
from .reduction import SentProfile, common_profile

T = TypeVar("T")


def agree_on_sample(read: Callable[[], T], group: Any) -> T:
    """Return this process's result of `read` after it has succeeded in all processes.

    Raises:
        MeasureError: if it raises in another process. Whatever it raises here.
    """
    found: list[T] = []
    from_everyone(lambda: found.append(read()), "take the sample", group)
    return found[0]


def agree_on_profile(measure: Callable[[], Profile], group: Any) -> Profile:
    """This process's profile with the costs that all processes have in common (`planning.reduction`).

    Raises:
        MeasureError: if the processes have different stages, or another one could not measure. Whatever `measure`
            raises here.
    """
    found: list[Profile] = []

    def told() -> SentProfile:
        found.append(measure())
        return SentProfile(found[0])

    everyone = from_everyone(told, "measure the model", group)
    return common_profile(found[0], everyone)


def agree_on_limit(mem_limit: Callable[[], int], group: Any) -> int:
    """The smallest result of `mem_limit` in any process, in bytes.

    Raises:
        LimitError: if it raises in another process. Whatever it raises here.
    """
    return min(from_everyone(mem_limit, "take the limit", group, LimitError))


def agree_on_sequence(solve: Callable[[], Plan], group: Any) -> Plan:
    """The first process's result of `solve`. Only one process solves, since the result of a timed search may vary.

    Raises:
        InfeasibleError: in all processes, if the first one raises it.
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
    """Raise MeasureError if FSDP2 shards a stage's parameters by a module around it: the backward of one stage would
    then free the gathered parameters of all."""
    if not any(shards(module) for module in root.modules()):
        return
    for stage in stages:
        for module in stage.modules:
            inside = {id(p) for m in module.modules() if shards(m) for p in m.parameters()}
            if any(id(p) not in inside for p in module.parameters()):
                raise MeasureError(
                    f"the parameters of stage {stage.name!r} are sharded by a module around it; fully_shard each stage"
                    " with parameters, then the rotoff.Checkpointable"
                )


def from_everyone(act: Callable[[], T], what: str, group: Any, error_type: type[RotoffError] = MeasureError) -> list[T]:
    """The results of `act` in all processes; if it fails in one it raises in all, so that none waits forever."""
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
