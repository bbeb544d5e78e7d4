"""`plan`: what training a model within a limit on a device costs, without the device: ``print(rotoff.plan(...))``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.sequence import MODES
from ..errors import OptionError, nearest
from ..io.progress import Bar
from ..profile.estimate.devices import Device, find
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
    master_weights: bool = False,
    stages: int | Iterable[str] | None = None,
    backward_from: str | int | Iterable[str | int] | None = None,
    forms: bool | Iterable[str] = True,
    pipeline: int | None = None,
    microbatches: int = 1,
    schedule: str = "1F1B",
    chunks: int = 1,
    ranks_per_link: int = 1,
    **kwargs: Any,
) -> PlannedModes | PlannedPipeline:
    """Say whether a model trains on `device`, and how, without the device and without memory.

    The table has rows for plain PyTorch, for what people set elsewhere, and for rotoff; then the time that no plan can
    beat. Parameters, gradients and states may move, too, unless a `mem_limit` is given.

    Args:
        model, sample, kwargs: as for `rotoff.estimate`.
        mem_limit: bytes of one step, as for `Checkpointable`. At most the device's memory less parameters, gradients,
            states, the batch and a margin.
        device: a name (``rotoff.devices()`` lists them) or a `Device`.
        modes: any of "joint", "remat", "offload", or one of them. mem_slots: as for `rotoff.solve`.
        optimizer: "sgd", "momentum", "adam" or "adamw"; its states count as resident bytes.
        host_bandwidth: B/s of the host's memory while the link is busy, for updates on the host.
        master_weights: whether the optimizer holds float32 copies of parameters in half precision, and its states in
            float32. PyTorch's own optimizers hold states of the parameters' types, and no copies.
        stages, backward_from, forms: as for `Checkpointable`.
        pipeline: number of ranks of a pipeline, each with such a device and `mem_limit`. The result has a row for each,
            and the step time with bubbles. Tensors of the sample are split into `microbatches` (first dimension).
        schedule: "GPipe", "1F1B" or "Interleaved1F1B". chunks: stages of each rank. ranks_per_link: that share one.

    Raises:
        OptionError: for an unknown device, mode or optimizer; the message names the known ones.
        LimitError: if `mem_limit` is not a number of bytes, or nothing fits the device.
        MeasureError: if the model cannot be estimated.
    """
    target = find(device)
    asked = modes, mem_limit, optimizer, mem_slots, host_bandwidth, master_weights
    options = given(stages=stages, backward_from=backward_from, forms=forms)
    if pipeline is None:
        of_pipelines = {"microbatches": microbatches, "chunks": chunks, "ranks_per_link": ranks_per_link}
        if needless := [f"{name}={number!r}" for name, number in of_pipelines.items() if number != 1]:
            raise OptionError(f"{needless[0]} is for a pipeline; give the number of its ranks as pipeline=, too")
        from .mode_comparison import Question, answer

        _check(model, kwargs)
        with Bar("planning") as bar:
            return answer(with_options(model, options), sample, kwargs, target, Question.read(*asked), bar)
    ranks = pipeline, microbatches, schedule, chunks, ranks_per_link
    return _of_pipeline(model, sample, kwargs, target, asked, options, ranks)


def _of_pipeline(
    model: nn.Module,
    sample: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Device,
    asked: tuple[Any, ...],
    options: dict[str, Any],
    ranks: tuple[Any, ...],
) -> PlannedPipeline:
    """The answer for a pipeline. ranks: the arguments of `pipeline_plan.Asked`."""
    from .mode_comparison import Question
    from .pipeline_plan import Asked, planned_pipeline

    _check(model, kwargs)
    question, usable = Question.read(*asked), usable_bytes(target.memory_bytes)
    return planned_pipeline(
        with_options(model, options),
        sample,
        kwargs,
        target,
        Asked(*ranks),
        question.mem_limit,
        usable,
        question.optimizer,
        question.host_bandwidth,
        question.master_weights,
    )


def given(**options: Any) -> dict[str, Any]:
    """Those of these arguments of `plan` that are not the default."""
    usual = inspect.signature(plan).parameters
    return {name: value for name, value in options.items() if value is not usual[name].default}


def with_options(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """`model` as a `Checkpointable` with `options`; itself if there are none.

    Raises:
        OptionError: if it is a `Checkpointable` already.
    """
    from ..checkpointable import Checkpointable

    if options and isinstance(model, Checkpointable):
        raise OptionError(f"the model is a Checkpointable; give {next(iter(options))} to it alone")
    return Checkpointable(model, **options) if options else model


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
    said = f"{name} is no argument of rotoff.plan, nor of the forward of {type(inner).__name__}"
    raise OptionError(said + nearest(name, inspect.signature(plan).parameters))
