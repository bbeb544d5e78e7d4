"""`attach_schedule` plans the stages that a process runs in a pipeline of ``torch.distributed.pipelining``.

The schedule's order determines how many micro-batches are in flight. The stages of one process share its limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from ..checkpointable import Checkpointable
from ..core.pipeline import SCHEDULES, Order, Task, most_in_flight, orders
from ..core.sizes import format_bytes
from ..errors import InfeasibleError, OptionError
from ..planning.link_share import link_share
from .attach import attach, attached, detach
from .config import RotoffConfig, read_settings

WHOLE = "ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B and ScheduleLoopedBFS"
_TRIES = 8  # attempts to make stages fit their common limit; each lowers every stage's limit by the excess
_KINDS = {"FORWARD": False, "FULL_BACKWARD": True}


def attach_schedule(
    schedule: Any, mem_limit: int | str | RotoffConfig | None = None, mode: str | None = None, **options: Any
) -> list[Checkpointable]:
    """Run this process's stages of a pipeline inside `mem_limit`; returns the `Checkpointable` of each stage.

    Call it in every process, after the schedule is made and before its first ``step``. Every process has its own plan,
    so limits may differ. Processes that run one stage together (tensor or context parallel) give their group as
    ``process_group=mesh["tp"].get_group()``, and have one plan. The limit covers all micro-batches in flight, and all
    stages of the process::

        stage = PipelineStage(module, rank, ranks, device)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        rotoff.attach_schedule(schedule, "6 GiB")

    Stages are measured and planned in the first step. Not counted are the loss (unless the last stage computes it), the
    outputs that ``step`` collects on the last rank (avoid them with ``return_outputs=False``), and the buffers for
    tensors received from neighbours.

    Args:
        schedule: a ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS of
            ``torch.distributed.pipelining``.
        mem_limit, mode, options: as for `rotoff.attach`.

    Raises:
        OptionError: for a schedule that splits the backward (zero bubble), for anything that is no schedule, and for a
            process_group that has ranks of other stages.
    """
    stages, order = _read(schedule)
    given = read_settings(mem_limit, options)
    if "in_flight" in given:
        raise OptionError(f"in_flight is {given['in_flight']!r}; the schedule determines it, so leave it out")
    _check_group(given.get("process_group"), stages[0].group)
    many = most_in_flight(order)
    modules = [_module(stage) for stage in stages]
    planned: list[Checkpointable] = []
    try:
        for module in modules:
            planned.append(attach(module, mem_limit, mode, in_flight=many, **options))
    except BaseException:
        for module, _ in zip(modules, planned, strict=False):
            detach(module)
        raise
    for one in planned[1:]:  # else each stage would keep host memory for its own most in flight
        one._use_links_of(planned[0])
    planned[0]._links.share = link_share(planned[0]._steps.device_for([]), planned[0]._options.host_directory)
    numbered = {stage.stage_index: one for stage, one in zip(stages, planned, strict=True)}
    _Sharing(numbered, order, stages[0].num_stages - 1, isinstance(schedule, Schedule1F1B))
    return planned


def _read(schedule: Any) -> tuple[list[Any], Order]:
    """The stages of this process, and the order of its tasks."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages[0] is None:
        raise OptionError(f"the schedule is {schedule!r}; give one of torch.distributed.pipelining, such as {WHOLE}")
    many, name = schedule._n_microbatches, type(schedule).__name__
    if len(stages) == 1 and (kind := name.removeprefix("Schedule").lower()) in SCHEDULES:
        return stages, orders(kind, stages[0].num_stages, many)[stages[0].stage_index]
    found = []
    for action in (getattr(schedule, "pipeline_order", None) or {}).get(stages[0].group_rank, ()):
        if action is None or action.computation_type.name == "REDUCE_GRAD":
            continue
        if action.computation_type.name not in _KINDS:
            raise OptionError(
                f"{name} splits the backward ({action}), and each part would make all values again; use {WHOLE}"
            )
        found.append(Task(action.stage_index, _KINDS[action.computation_type.name], action.microbatch_index))
    if not any(task.backward for task in found):
        raise OptionError(f"{name} runs no backward, so there is nothing to plan; use {WHOLE}")
    return stages, tuple(found)


def _module(stage: Any) -> nn.Module:
    """The stage's model without a DistributedDataParallel wrapper."""
    module: nn.Module = stage.submod
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _check_group(process_group: Any, pipeline: Any) -> None:
    """Raise OptionError if processes of several stages would have one plan: they would wait for each other."""
    if process_group in (None, False):
        return
    one_plan = dist.get_process_group_ranks(None if process_group is True else process_group)
    if shared := sorted({*one_plan}.intersection(dist.get_process_group_ranks(pipeline)) - {dist.get_rank()}):
        raise OptionError(
            f"process_group has the ranks {shared} of other stages; give the group of the processes that run the same"
            ' stage together, such as mesh["tp"].get_group()'
        )


class _Sharing:
    """Plans the stages of one process together as soon as a step of each has been recorded.

    Until then what they save leaves the device at once. Outputs and gradients that were sent count, too: PyTorch's
    schedules hold all of them to the end of a step, and Schedule1F1B one of each.
    """

    def __init__(self, planned: dict[int, Checkpointable], order: Order, last: int, one_at_once: bool) -> None:
        self._planned, self._order, self._last, self._one_at_once = planned, order, last, one_at_once
        self._hooks = [
            one._model.register_forward_pre_hook(self._plan_together, with_kwargs=True) for one in planned.values()
        ]
        for one in planned.values():
            one._steps.waits = True

    def _plan_together(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """A forward pre-hook: plan all stages once a step of each has been recorded."""
        if any(attached(one._model) is not one for one in self._planned.values()):
            self._end()
            return
        if not torch.is_grad_enabled():
            return
        steps = {number: one._steps for number, one in self._planned.items()}
        for runner in steps.values():
            runner.settle()
        if any(runner.latest is None for runner in steps.values()):
            return
        requests = {number: runner.request for number, runner in steps.items() if runner.request is not None}
        asked, less = min(request.mem_limit for request in requests.values()), 0
        try:
            for _ in range(_TRIES):
                for number, runner in steps.items():
                    runner.ask(replace(requests[number], mem_limit=asked - less))
                over = self._needed({number: one._plan for number, one in self._planned.items()}) - asked
                if over <= 0:
                    break
                less = max(less + over, 2 * less)
            else:
                raise InfeasibleError(
                    f"no plans were found by which the stages {', '.join(map(str, steps))} of this process share"
                    f" {format_bytes(asked)} ({asked} bytes); give about {format_bytes(asked + over)}"
                    f" ({asked + over} bytes)",
                    asked + over,
                )
        except BaseException:
            for number, runner in steps.items():
                runner.request = requests[number]
            raise
        self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for one in self._planned.values():
            one._steps.waits = False

    def _needed(self, plans: dict[int, Any]) -> int:
        """The most bytes that these plans hold together at any time of the schedule."""
        rest = {s: plan.resting for s, plan in plans.items()}
        shared = {s: plan.profile.trace.unsharded for s, plan in plans.items()}
        active = {s: plan.peak - (plan.execution.in_flight - 1) * rest[s] - shared[s] for s, plan in plans.items()}
        held = sent = most = 0
        for task in self._order:
            held -= rest[task.stage] if task.backward else 0
            most = max(most, held + sent + active[task.stage] + sum(shared.values()))
            held += 0 if task.backward else rest[task.stage]
            if task.backward:
                chain = plans[task.stage].chain
                kept = self._one_at_once or task.stage != self._last  # in a variable, or as sent
                onward = chain.output_bytes(len(chain)) if kept else 0
                # the gradients of what it received
                back = plans[task.stage].profile.batch_bytes if task.stage and not self._one_at_once else 0
                sent = back + onward + (0 if self._one_at_once else sent)
        return most
