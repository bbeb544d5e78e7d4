"""Makes all processes of a group use one profile, the smallest limit, and the first process's plan.

If stages communicate while they run (sharded parameters are gathered), processes with different plans would wait for
each other forever. All processes must call these functions together: each new input signature in the same step. Every
exchange is an all-gather, or a broadcast of the first process; an error is exchanged like a result.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ExecutionError, LimitError, MeasureError, OptionError, RotoffError
from ..runtime.sharded import Shards, sharded

T = TypeVar("T")
ANSWER = 5.0  # seconds in which a process of the group answers, once a collective has failed
TAG = 31_337  # of the message that asks for an answer


def agree_on_sample(read: Callable[[], T], group: Any) -> T:
    """Return this process's result of `read` after it has succeeded in all processes.

    Raises:
        MeasureError: if it raises in another process. Whatever it raises here.
    """
    found: list[T] = []
    from_everyone(lambda: found.append(read()), "take the sample", group)
    return found[0]


def agree_on_limit(mem_limit: Callable[[], int], group: Any) -> int:
    """The smallest result of `mem_limit` in any process, in bytes.

    Raises:
        LimitError: if it raises in another process. Whatever it raises here.
    """
    return min(from_everyone(mem_limit, "take the limit", group, LimitError))


def from_everyone(act: Callable[[], T], what: str, group: Any, error_type: type[RotoffError] = MeasureError) -> list[T]:
    """The results of `act` in all processes; if it fails in one it raises in all, so that none waits forever."""
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
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise OptionError(
            "device_limit with FSDP2 is for processes on a CPU so far; on an accelerator give fully_shard an"
            " offload_policy=CPUOffloadPolicy(), and a mem_limit"
        )
    return Shards(model)


def not_answering(error: BaseException, group: Any) -> ExecutionError:
    """What to raise if a collective has failed: it names the processes of the group that have ended, or else those that
    do not answer."""
    ended, late = list[str](), list[str]()
    for peer in range(dist.get_world_size(group)):
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
