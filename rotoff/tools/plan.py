"""`plan`: what training a model within a limit on a device costs, without the device: ``print(rotoff.plan(...))``.

An answer that is in the cache is returned before the modules that would find it are imported.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.sequence import MODES
from ..errors import OptionError, nearest
from ..io.cache import Cache
from ..profile.estimate.devices import Device, find
from .plan_cache import find_plan, keep_plan, plan_key
from .planned_modes import PlannedModes, usable_bytes

if TYPE_CHECKING:
    from .pipeline_plan import PlannedPipeline

HOST_BANDWIDTH = 40e9  # B/s of two channels of DDR5, half of which the link takes


def plan(
    model: nn.Module,
    *sample: Any,
    mem_limit: int | str | None = None,
    device: Device | str = "H200",
    modes: Iterable[str] | str = MODES,
    optimizer: str = "adam",
    mem_slots: int = 50,
    host_bandwidth: float = HOST_BANDWIDTH,
    pipeline: int | None = None,
    microbatches: int = 1,
    schedule: str = "1F1B",
    chunks: int = 1,
    ranks_per_link: int = 1,
    cache_directory: str | os.PathLike[str] | bool | None = True,
    **kwargs: Any,
) -> PlannedModes | PlannedPipeline:
    """Estimate the cost of a training step within `mem_limit` on `device`, without the device and without memory.

    Without a `mem_limit` it also plans the whole training within the device's memory, where parameters, gradients and
    optimizer states may lie on the host: the step time, the host's bytes, the smallest device, the largest batch.

    Args:
        model, sample, kwargs: as for `rotoff.estimate`.
        mem_limit: bytes that one step may allocate beyond parameters, their gradients, optimizer states and the batch,
            as for `Checkpointable`. None, and at most: the device's memory less those and a margin.
        device: a name (``rotoff.devices()`` lists them) or a `Device`.
        modes: any of "joint", "remat", "offload", or one of them.
        mem_slots: as for `rotoff.solve`.
        optimizer: "sgd", "momentum", "adam" or "adamw"; its states count as resident bytes.
        host_bandwidth: B/s of the host's memory while the link is busy, for updates on the host.
        pipeline: number of ranks of a pipeline, each with such a device. The result then has a row for each rank, and
            the step time of the pipeline, bubbles included. The sample is the whole batch; each of its tensors is split
            into `microbatches` along its first dimension. `mem_limit` is for each rank.
        schedule: "GPipe", "1F1B" or "Interleaved1F1B". chunks: stages of each rank. ranks_per_link: neighbours that
            share a link to the host.
        cache_directory: where the answer, unless it is a pipeline's, is kept for the next process; as for
            `Checkpointable`.

    Raises:
        OptionError: for an unknown device, mode or optimizer; the message names the known ones.
        LimitError: if `mem_limit` is not a number of bytes, or nothing fits the device.
        MeasureError: if the model cannot be estimated.
    """
    target, cache = find(device), Cache.of(cache_directory)
    asked = modes, mem_limit, optimizer, mem_slots, host_bandwidth
    if pipeline is None:
        of_pipelines = {"microbatches": microbatches, "chunks": chunks, "ranks_per_link": ranks_per_link}
        if given := [f"{name}={number!r}" for name, number in of_pipelines.items() if number != 1]:
            raise OptionError(f"{given[0]} is for a pipeline; give the number of its ranks as pipeline=, too")
        return _known(model, sample, kwargs, target, cache, asked)
    from .mode_comparison import Question
    from .pipeline_plan import Asked, planned_pipeline

    _check(model, kwargs)
    ranks = Asked(pipeline, microbatches, schedule, chunks, ranks_per_link)
    limits = Question.read(*asked).mem_limit, usable_bytes(target.memory_bytes)
    return planned_pipeline(model, sample, kwargs, target, ranks, *limits, optimizer, host_bandwidth)


def _known(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Device,
    cache: Cache,
    asked: tuple[Any, ...],
) -> PlannedModes:
    """The answer in `cache`, else a new one, which is kept there."""
    recognised = cache.directory is not None and isinstance(model, nn.Module)
    if recognised and any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        recognised = False  # and refused
    key = plan_key(model, sample, kwargs, target, asked) if recognised else None
    if (known := find_plan(cache, key)) is not None:
        return known
    from .mode_comparison import Question, answer

    _check(model, kwargs)
    found = answer(model, sample, kwargs, target, Question.read(*asked))
    keep_plan(cache, key, found)
    return found


def _check(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise MeasureError if `model` is no module, OptionError for a name that neither `plan` nor its forward takes."""
    from ..checkpointable import Checkpointable
    from ..planning.options import check_module

    check_module(model)
    inner = model._model if isinstance(model, Checkpointable) else model
    if not kwargs or isinstance(inner, torch.jit.ScriptModule):
        return
    takes = inspect.signature(inner.forward).parameters.values()
    unknown = sorted({*kwargs} - {one.name for one in takes})
    if not unknown or any(one.kind is one.VAR_KEYWORD for one in takes):
        return
    name = unknown[0]
    if name in inspect.signature(Checkpointable).parameters:
        raise OptionError(f"{name} is an option of Checkpointable; give Checkpointable(model, {name}=...) as the model")
    said = f"{name} is no argument of rotoff.plan, nor of the forward of {type(inner).__name__}"
    raise OptionError(said + nearest(name, inspect.signature(plan).parameters))
