"""Forms of a stage whose convolutions use other algorithms: equally many stored bytes, smaller transients, more time.

Nothing is known of an algorithm before it has run. For each one that can be chosen (`tensors.convolutions`), the
interpreter runs the stage, for the first time and as a replay, and its transients and times are measured. A form that
frees too few bytes is left out. So is one whose results have another memory layout, because the next stage's views
would then read other numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...capture.operations import OperationLog
from ...core.chain import Form
from ...tensors.convolutions import Algorithms, forward_by
from ...tensors.recipe import Recipe
from ...tensors.saved_tensors import watch_saved
from ...tensors.stage import SavedKind
from ...tensors.tree import flatten
from ..timing.context import MeasurementContext
from ..timing.convergence import Series, more_than_first
from ..timing.harness import Run, backward, get_edges, ones
from ..timing.stage_timing import Clock
from .variant_run import VariantRun, WholeStage

CONVOLUTIONS = frozenset({"convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose"})
Pair = tuple[Form, Recipe]


def convolves(log: OperationLog) -> bool:
    """Whether the stage of this log contains a convolution."""
    return any(op.name in CONVOLUTIONS for op in log.operations)


def find_conv_forms(
    context: MeasurementContext,
    stage: WholeStage,
    algorithms: Sequence[Algorithms],
    smallest: Pair | None,
    known: dict[Any, float | None],
) -> list[Pair]:
    """Return forms of `stage` with other `algorithms`: the whole stage with each, and its smallest form with the best.

    Args:
        stage: with the algorithms that the flags choose.
        smallest: its form of fewest bytes, if any.
        known: seconds of the backward by `Recipe.identity`; if there are some, no other form is tried.
    """
    own = frozenset(n for n, kind in enumerate(stage.behaviour.saved) if kind is SavedKind.OWN)
    whole = stage.costs.form(0), Recipe(own, {}, 0, (), {})
    # the machine always charges the gradient that a backward makes
    made = sum(t.numel() * t.element_size() for t in stage.run.tensors if t.requires_grad)
    found: list[tuple[Form, VariantRun]] = []

    def add(base: Pair, by: Algorithms) -> None:
        """Add the form `base` with other algorithms, if it is worth a choice."""
        variant = VariantRun(stage, replace(base[1], algorithms=by), context)
        if (known and variant.recipe.identity not in known) or not _behaves_alike(stage.run, variant):
            return
        form = replace(variant.costs(0.0), saved_bytes=base[0].saved_bytes)
        forward_freed = base[0].forward_transient_bytes - form.forward_transient_bytes
        backward_freed = max(made, base[0].backward_transient_bytes) - max(made, form.backward_transient_bytes)
        if max(forward_freed, backward_freed) >= max(1.0, stage.worth):
            found.append((form, variant))

    for by in algorithms:
        add(whole, by)
    if smallest is not None:
        wholes = len(found)
        for by in algorithms:
            add(smallest, by)
        if len(found) > wholes:  # a plan takes this form if it is short of bytes, so the leanest is enough
            found[wholes:] = [min(found[wholes:], key=lambda one: _peak(one[0]))]
    seconds = [known.get(variant.recipe.identity) for _, variant in found]
    if None in seconds:
        more = _more_seconds(context, VariantRun(stage, whole[1], context), [variant for _, variant in found])
        seconds = [stage.costs.backward_time + one for one in more]
    pairs = zip(found, seconds, strict=True)
    return [(replace(form, backward_time=time), variant.recipe) for (form, variant), time in pairs if time is not None]


def _peak(form: Form) -> int:
    return max(form.forward_transient_bytes, form.backward_transient_bytes)


def _behaves_alike(run: Run, variant: VariantRun) -> bool:
    """Whether the stage saves and returns the same layouts as before, and also runs as a replay."""
    try:
        if _layout(run, variant.recipe.algorithms) != _layout(run, None):
            return False
        for again in (False, True):  # cuDNN keeps plans for each thread, and replays run on autograd's
            outputs = variant.forward(again)[0]
            edges = get_edges(outputs)
            backward(edges, ones(outputs), variant.targets(edges))
    except Exception:  # the algorithm does not support the shape or dtype, or uses other operations
        return False
    return True


def _layout(run: Run, algorithms: Algorithms | None) -> list[Any]:
    def layout(tensor: torch.Tensor) -> Any:
        return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype

    found: list[Any] = []
    with forward_by(algorithms), watch_saved(lambda t: found.append(layout(t))):
        outputs = flatten(run.forward(run.leaves()))[0]
    return [found, [layout(t) for t in outputs]]


def _more_seconds(context: MeasurementContext, plain: VariantRun, variants: Sequence[VariantRun]) -> list[float]:
    """Return how many seconds forward and backward of each variant take more than those of `plain`, as medians of runs
    in turn."""
    if not variants:
        return []
    ticks = Clock(context.device)

    def more() -> list[Series]:
        spans = ticks.spans()
        sums = [spans[n] + spans[n + 2] for n in range(0, len(spans) - 3, 4)]
        return more_than_first(sums, 1 + len(variants))

    for _ in context.repeats.rounds(more):
        for variant in (plain, *variants):
            ticks.tick()
            outputs, _ = variant.forward()
            ticks.tick()
            edges, gradients = get_edges(outputs), ones(outputs)
            targets = variant.targets(edges)
            outputs.clear()
            ticks.tick()
            backward(edges, gradients, targets)
            ticks.tick()
    return [max(0.0, statistics.median(series.seconds)) for series in more()]


def beaten_by(form: Form, others: Collection[Form]) -> bool:
    """Whether one of `others` takes no more bytes and no more time."""
    return any(
        o.saved_bytes <= form.saved_bytes
        and o.backward_time <= form.backward_time
        and o.forward_transient_bytes + o.saved_bytes <= form.forward_transient_bytes + form.saved_bytes
        and o.backward_transient_bytes + o.saved_bytes <= form.backward_transient_bytes + form.saved_bytes
        for o in others
    )
