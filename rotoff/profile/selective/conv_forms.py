"""Forms in which convolutions run by other algorithms: as much is stored, fewer bytes pass while the stage runs, and it
takes longer.

Nothing is known of an algorithm before it has run: under each that can be chosen (`tensors.convolutions`) the stage is
run by the interpreter, in its two ways (for the first time, and again), and its transients and times are measured. What
frees too few bytes is left out, and so is an algorithm whose results lie otherwise in memory, since the next stage's
views would find other numbers.
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
    bench: MeasurementContext,
    stage: WholeStage,
    algorithms: Sequence[Algorithms],
    smallest: Pair | None,
    known: dict[Any, float],
) -> list[Pair]:
    """Forms of `stage` with other `algorithms`: of the whole stage with each, of its smallest form with the leanest.

    Args:
        stage: as the flags have its convolutions run. smallest: its form of fewest bytes, if any. known: seconds of
            backward by `Recipe.identity`; where there are some, no other form is tried.
    """
    own = frozenset(n for n, kind in enumerate(stage.behaviour.saved) if kind is SavedKind.OWN)
    whole = stage.costs.form(0), Recipe(own, {}, 0, (), {})
    # of a backward's bytes the machine charges those of the gradient that it makes in any case
    made = sum(t.numel() * t.element_size() for t in stage.run.tensors if t.requires_grad)
    found: list[tuple[Form, VariantRun]] = []

    def tried(base: Pair, by: Algorithms) -> None:
        """Add the form `base` by other algorithms, where that is worth a choice."""
        trial = VariantRun(stage, replace(base[1], algorithms=by), bench)
        if (known and trial.recipe.identity not in known) or not _runs(stage.run, trial):
            return
        form = replace(trial.costs(0.0), saved_bytes=base[0].saved_bytes)
        forward_freed = base[0].forward_transient_bytes - form.forward_transient_bytes
        backward_freed = max(made, base[0].backward_transient_bytes) - max(made, form.backward_transient_bytes)
        if max(forward_freed, backward_freed) >= max(1.0, stage.worth):
            found.append((form, trial))

    for by in algorithms:
        tried(whole, by)
    if smallest is not None:
        wholes = len(found)
        for by in algorithms:
            tried(smallest, by)
        if len(found) > wholes:  # one of them is enough: whoever takes this form is short of bytes
            found[wholes:] = [min(found[wholes:], key=lambda one: _peak(one[0]))]
    seconds = [known.get(trial.recipe.identity) for _, trial in found]
    if None in seconds:
        more = _more_seconds(bench, VariantRun(stage, whole[1], bench), [trial for _, trial in found])
        seconds = [stage.costs.backward_time + one for one in more]
    pairs = zip(found, seconds, strict=True)
    return [(replace(form, backward_time=time), trial.recipe) for (form, trial), time in pairs if time is not None]


def _peak(form: Form) -> int:
    return max(form.forward_transient_bytes, form.backward_transient_bytes)


def _runs(run: Run, trial: VariantRun) -> bool:
    """Whether the stage saves and returns the same as ever, lying as ever, and runs for the first time and again."""
    try:
        if _layout(run, trial.recipe.algorithms) != _layout(run, None):
            return False
        for again in (False, True):  # plans that cuDNN looks for are kept by thread, and replays are the autograd's
            outputs = trial.forward(again)[0]
            backward(get_edges(outputs), ones(outputs), trial.targets())
    except Exception:  # no such algorithm for this shape or type, or other operations with it
        return False
    return True


def _layout(run: Run, algorithms: Algorithms | None) -> list[Any]:
    def lies(tensor: torch.Tensor) -> Any:
        return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype

    found: list[Any] = []
    with forward_by(algorithms), watch_saved(lambda t: found.append(lies(t))):
        outputs = flatten(run.forward(run.leaves()))[0]
    return [found, [lies(t) for t in outputs]]


def _more_seconds(bench: MeasurementContext, plain: VariantRun, trials: Sequence[VariantRun]) -> list[float]:
    """Of each trial, the median seconds that forward and backward together take more than those of `plain`; runs in
    turn."""
    if not trials:
        return []
    ticks = Clock(bench.device)

    def more() -> list[Series]:
        spans = ticks.spans()
        sums = [spans[n] + spans[n + 2] for n in range(0, len(spans) - 3, 4)]
        return more_than_first(sums, 1 + len(trials))

    for _ in bench.repeats.rounds(more):
        for trial in (plain, *trials):
            ticks.tick()
            outputs, _ = trial.forward()
            ticks.tick()
            edges, gradients = get_edges(outputs), ones(outputs)
            outputs.clear()
            ticks.tick()
            backward(edges, gradients, trial.targets())
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
