"""`plan`: what training a model within a limit on a device costs, without the device: ``print(rotoff.plan(...))``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..core.backward_from import BackwardFrom
from ..core.sequence import MODES
from ..io.progress import Bar
from ..planning.options import Options
from ..planning.stages import StagesOption
from ..profile.allocations import without_gc
from ..profile.estimate.devices import Device, find
from .foreign_settings import read_foreign
from .mesh import Mesh
from .pipeline_plan import PlannedPipeline, planned_pipeline, refuse_alone
from .planned_steps import PlannedSteps
from .question import HOST_BANDWIDTH, Question


def plan(
    model: nn.Module,
    *sample: Any,
    mem_limit: int | str | None = None,
    device: Device | str = "H200",
    modes: Iterable[str] | str = MODES,
    optimizer: str = "adam",
    host_bandwidth: float = HOST_BANDWIDTH,
    master_weights: bool = False,
    stages: StagesOption = None,
    backward_from: BackwardFrom = None,
    forms: bool = True,
    pipeline: int | None = None,
    microbatches: int = 1,
    schedule: str = "1F1B",
    chunks: int = 1,
    ranks_per_link: int = 1,
    mesh: str | None = None,
    link: float | None = None,
    settings: Any = None,
    cache_directory: Any = None,
    **kwargs: Any,
) -> PlannedSteps | PlannedPipeline:
    """Say whether a model trains on `device`, and how, without the device and without memory.

    The table has rows for plain PyTorch, for what people set elsewhere, and for rotoff where plain PyTorch does not
    fit; then the time that no plan can beat. Parameters, gradients and states may move, too, without a `mem_limit`.

    Args:
        model, sample, kwargs: as for `rotoff.estimate`. stages, backward_from, forms: as for `Checkpointable`.
        mem_limit: bytes of one step, as for `Checkpointable`; at most what resident bytes and a margin leave.
        device: a name (``rotoff.devices()`` lists them) or a `Device`.
        modes: any of "joint", "remat", "offload", or one of them.
        optimizer: "sgd", "momentum", "adam" or "adamw"; its states count as resident bytes.
        host_bandwidth: B/s of the host's memory while the link is busy, for updates on the host.
        master_weights: whether parameters in half precision have copies and states in float32; PyTorch's have not.
        pipeline: number of ranks of a pipeline, each with such a device and `mem_limit`. The result has a row for each,
            and the step time with bubbles. Tensors of the sample are split into `microbatches` (first dimension).
            schedule: "GPipe", "1F1B" or "Interleaved1F1B". chunks: stages of a rank. ranks_per_link: that share one.
        mesh: ranks that share the training, "fsdp=8" or "fsdp=8,tp=2", each with such a device and this sample. PyTorch
            shards: ``fully_shard`` the model's blocks, modules with a number as their name, and a model of transformers
            its tensor parallel plan. Rows are for each rank, and plain PyTorch is FSDP2. link: B/s that a rank can send
            to the others (default: the device's ``interconnect``). cache_directory: not used; nothing is kept.
        settings: another tool's, for the row "now: ..."; without a `mem_limit` all rows are for the bytes that they
            take. A ``transformers.TrainingArguments``, FSDP2's policies, or the path or content of a DeepSpeed (JSON),
            axolotl (YAML) or torchtitan (TOML) file. Their optimizer, master weights and autocast count.

    Raises:
        OptionError: for an unknown device, mode, optimizer or axis; the message names the known ones.
        LimitError: if `mem_limit` is no number of bytes. MeasureError: if nothing can be estimated.
    """
    foreign = None if settings is None else read_foreign(settings)
    how = optimizer, host_bandwidth, master_weights, Mesh.of(mesh, link, pipeline), foreign
    asked = Question(find(device), Options(stages, backward_from, forms), modes, mem_limit, *how)
    if pipeline is not None:
        return planned_pipeline(model, sample, kwargs, asked, pipeline, microbatches, schedule, chunks, ranks_per_link)
    refuse_alone(microbatches=microbatches, chunks=chunks, ranks_per_link=ranks_per_link)
    with Bar("planning") as bar, without_gc():  # one collection looks at all objects, as long as some stages take
        return asked.answered(model, sample, kwargs, bar)


def audit(model: nn.Module, *sample: Any, settings: Any, **options: Any) -> PlannedSteps | PlannedPipeline:
    """Say what another tool's settings take, and what is possible in the same bytes: `plan` with `settings`.

    Args:
        model, sample, settings, options: as for `plan`; options are its other arguments and the model's named ones.

    Raises:
        OptionError: for settings of another kind, and as for `plan`. OSError: if their file cannot be read.
    """
    return plan(model, *sample, settings=settings, **options)
