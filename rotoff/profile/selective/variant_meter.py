"""Finds and measures the forms of a stage: what each stores, and what its redo and backward take in bytes and seconds.

Each form is verified first. Its redo runs with every tensor that it must not read filled with NaN, and its result is
compared, bit for bit, with what autograd saved. Then it is measured as the interpreter runs it (`variant_run`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch

from ...accelerator import is_accelerator
from ...capture.operations import OperationLog
from ...core.chain import Form, Stage
from ...runtime.replay import ReplayState
from ...runtime.selective import redo
from ...tensors.autocast import uncached_autocast
from ...tensors.convolutions import Algorithms
from ...tensors.recipe import Recipe
from ...tensors.rng import Generators
from ...tensors.saved_tensors import watch_saved
from ...tensors.stage import SavedKind
from ...tensors.storage import bytes_of
from ..memory.allocator import UNSPLIT
from ..timing.context import MeasurementContext
from ..timing.convergence import LONG, Series
from ..timing.harness import Run
from ..timing.stage_timing import Clock
from ..timing.timing_cache import KnownForms
from .conv_forms import beaten_by, convolves, find_conv_forms
from .variant_run import VariantRun, WholeStage
from .variants import Choice, FormPolicy, StageGraph, structure, unfit


@dataclass(frozen=True)
class FoundForms:
    """Forms of a stage, smallest last, and how to make them. reason: why there are none; empty if there are some."""

    forms: tuple[Form, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    reason: str = ""


class FormMeter:
    """Finds and measures forms; stages of the same structure share the work.

    Args:
        policy: the user's policy on what is kept, if any.
        partial: whether to look for forms that store a part.
        algorithms: further algorithms that convolutions may use (`conv_forms`).
    """

    recorded = 2  # recordings; the faster time of each operation counts
    estimates = False  # whether forms are estimated instead of measured

    def __init__(
        self,
        context: MeasurementContext,
        policy: FormPolicy | None,
        partial: bool = True,
        algorithms: Sequence[Algorithms] = (),
    ) -> None:
        self.context = context
        self._policy = policy
        self._partial = partial
        self.algorithms = tuple(algorithms)
        self._shared: dict[Any, tuple[Stage, FoundForms]] = {}

    def find(
        self, stage: WholeStage, times: KnownForms | None = None, recorded: OperationLog | None = None
    ) -> FoundForms:
        """Return the forms of `stage`.

        Args:
            times: the forms to look for, with their times unless these are to be measured; None: all.
            recorded: the stage's operations, if known.
        """
        try:
            return self._found(stage, times, recorded)
        except torch.OutOfMemoryError:  # a form and what it is compared with take more than a step
            return FoundForms(reason="the device has too little memory left to measure them")

    def _found(self, stage: WholeStage, times: KnownForms | None, recorded: OperationLog | None) -> FoundForms:
        run, costs, behaviour = stage.run, stage.costs, stage.behaviour
        if times == ():
            return FoundForms(reason="none was found when its times were measured")
        if (reason := unfit(run.stage)) is not None:
            return FoundForms(reason=reason)
        if run.collective:
            return FoundForms(reason="it communicates with other processes")
        no_parts = "" if self._partial else "switched off"
        if SavedKind.OWN not in behaviour.saved:
            no_parts = "autograd saves nothing that the stage makes"
        if no_parts and not self.algorithms:
            return FoundForms(reason=no_parts)
        try:
            logs = [recorded] if recorded is not None else []
            enough = times is not None or self.estimates or costs.forward_time >= LONG
            while len(logs) < (1 if enough else self.recorded):
                logs.append(self.context.recorded(run))
        except Exception as error:  # a forward may raise anything under a dispatch mode; forms are optional
            return FoundForms(reason=f"its operations could not be recorded ({type(error).__name__}: {error})")
        log = _fastest(logs)
        if log is None or len(log.packs) != len(behaviour.saved):
            return FoundForms(reason="it runs other operations when they are recorded")
        known = {one.identity: one.seconds for one in times or ()}
        key = structure(log, behaviour.saved), frozenset(known), self.estimates
        shared = self._shared.get(key)
        blocks = len(behaviour.saved) + len(log.operations) if is_accelerator(self.context.device) else 0
        if shared is not None and _alike(shared[0], costs, blocks * UNSPLIT):
            return _shifted(shared[1], costs.backward_time - shared[0].backward_time)
        graph = StageGraph(log, behaviour.saved)
        if (reason := graph.refusal()) is not None:
            return FoundForms(reason=reason)
        choices = [] if no_parts else self._choices(stage, graph, known)
        pairs, reason = (self._estimated if self.estimates else self._measured)(stage, choices, known)
        if self.algorithms and convolves(log):
            smallest = min(pairs, key=lambda pair: pair[0].saved_bytes, default=None)
            pairs += find_conv_forms(self.context, stage, self.algorithms, smallest, known)
        pairs = [pair for pair in pairs if not known or pair[1].identity in known]
        whole = costs.form(0)
        kept = [p for p in pairs if not beaten_by(p[0], [whole, *(f for f, _ in pairs if f is not p[0])])]
        kept.sort(key=lambda pair: -pair[0].saved_bytes)
        if not kept:
            reason = no_parts or reason or "no form is better than keeping everything"
        found = FoundForms(tuple(f for f, _ in kept), tuple(r for _, r in kept), "" if kept else reason)
        self._shared[key] = costs, found
        return found

    def _choices(self, stage: WholeStage, graph: StageGraph, known: dict[Any, float | None]) -> list[Choice]:
        """What to store in a form that stores a part. known: the stage's forms, if they are."""
        if known:
            own = {n for n, kind in enumerate(stage.behaviour.saved) if kind is SavedKind.OWN}
            # a form with other algorithms may be known where the one that it is based on was left out
            chosen = [graph.choice(kept) for kept in dict.fromkeys(kept for kept, _ in known) if own > set(kept)]
            return [choice for choice in chosen if choice is not None]
        saved = graph.nbytes(graph.saved - graph.given)
        return [c for c in graph.choices(self._policy) if saved - c.nbytes >= stage.worth]

    def _estimated(
        self, stage: WholeStage, choices: Sequence[Choice], _: object
    ) -> tuple[list[tuple[Form, Recipe]], str]:
        """Estimate the forms of `choices`: the forward keeps what they store, and the redo makes all else."""
        costs, pairs = stage.costs, []
        assert costs.checkpoint_transient_bytes is not None
        for choice in choices:
            saved = costs.output_bytes + choice.nbytes
            peak = max(0, max(0, costs.saved_bytes - saved) + stage.backward_peak)
            form = Form(saved, costs.backward_time + choice.seconds, costs.checkpoint_transient_bytes, peak)
            pairs.append((form, choice.recipe))
        return pairs, ""

    def _measured(
        self, stage: WholeStage, choices: Sequence[Choice], times: dict[Any, float | None]
    ) -> tuple[list[tuple[Form, Recipe]], str]:
        """Measure the forms of `choices`; also return why some of them failed. If any `times` are known, the other
        forms are not timed and count as 0 seconds."""
        if not choices:
            return [], "no tensors that could be recomputed take enough bytes"
        known = [times.get(choice.recipe.identity, 0.0 if times else None) for choice in choices]
        unknown = [choice.recipe for choice, seconds in zip(choices, known, strict=True) if seconds is None]
        redos = iter(self._redo_seconds(stage, unknown) if unknown else ())
        pairs: list[tuple[Form, Recipe]] = []
        for choice, seconds in zip(choices, known, strict=True):
            if seconds is None:
                redo_seconds = next(redos)
                if redo_seconds is None:
                    continue
                seconds = stage.costs.backward_time + redo_seconds
            pairs.append((VariantRun(stage, choice.recipe, self.context).costs(seconds), choice.recipe))
        return pairs, "" if len(pairs) == len(choices) else "a redo does not give the results of the first run"

    def _redo_seconds(self, stage: WholeStage, recipes: Sequence[Recipe]) -> list[float | None]:
        """Return the median seconds of each recipe's redo; None if it does not give the results of the first run."""
        run, repeats = stage.run, self.context.repeats.at_least(2)
        behaviour = stage.behaviour
        # the state before the run that redos are compared with
        state = ReplayState(Generators(self.context.device), behaviour.changed_buffers, modules=run.stage.modules)
        saved = _saved(run)
        proven = [_reproduces(stage, recipe, saved, state) for recipe in recipes]
        if not any(proven):
            return [None] * len(recipes)
        ticks = Clock(self.context.device)

        def series() -> list[Series]:
            spans = ticks.spans()[0::2]
            return [Series(spans[n :: sum(proven)], stage.costs.backward_time) for n in range(sum(proven))]

        for _ in repeats.rounds(series):
            for recipe in compress(recipes, proven):
                forward = partial(run.forward, run.leaves())
                stored = {n: saved[n] for n in recipe.kept}
                redone: list[torch.Tensor] = []
                keep = partial(_keep, redone)  # keep results, as a step does
                ticks.tick()
                redo(recipe, forward, stored, keep, state.again())
                ticks.tick()
        medians = (statistics.median(one.seconds) for one in series())
        return [next(medians) if one else None for one in proven]


def _keep(tensors: list[torch.Tensor], tensor: torch.Tensor) -> None:
    tensors.append(tensor.detach())


def _saved(run: Run) -> list[torch.Tensor]:
    """Return what autograd saves in a run of the stage."""
    saved: list[torch.Tensor] = []
    with watch_saved(partial(_keep, saved)):
        run.forward(run.leaves())
    return saved


def _reproduces(stage: WholeStage, recipe: Recipe, saved: Sequence[torch.Tensor], state: ReplayState) -> bool:
    """Whether a redo, started from `state`, gives bit for bit what autograd `saved` in the first run.

    If a second plain run also gives other bits, they are not compared: fused attention saves memory that it never
    writes (its random state, without dropout), and some kernels add in any order.
    """
    run, kinds = stage.run, stage.behaviour.saved
    if len(saved) != len(kinds):
        return False
    stored = {n: saved[n] for n in recipe.kept}
    compared = _Comparison(saved, kinds)
    leaves = run.leaves()
    try:
        redo(recipe, lambda: run.forward(leaves), stored, compared.look, state.again(), poison=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # such as an index out of range, if an operation reads NaN
        return False
    if not compared.differing:
        return True
    if not all(_similar(saved[n], other) for n, other in compared.differing.items()):
        return False
    _dirty([saved[n] for n in compared.differing])
    again = _Comparison(saved, kinds)
    with state.again(), uncached_autocast(), watch_saved(again.look):
        run.forward(run.leaves())
    return compared.differing.keys() <= again.differing.keys()


class _Comparison:
    """Compares what autograd saves in a later run with the first one.

    Attributes:
        differing: the stage's own tensors whose bits differ, by index.
    """

    def __init__(self, saved: Sequence[torch.Tensor], kinds: Sequence[SavedKind]) -> None:
        self._saved = saved
        self._kinds = kinds
        self._count = 0
        self.differing: dict[int, torch.Tensor] = {}

    def look(self, tensor: torch.Tensor) -> None:
        n, self._count = self._count, self._count + 1
        if self._kinds[n] is SavedKind.OWN and not _same_bits(tensor.detach(), self._saved[n]):
            self.differing[n] = tensor.detach()


def _similar(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `b` may equal `a` except for memory that nobody wrote (integers) and rounding (floats)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return True
    return torch.allclose(a, b, rtol=1e-2, atol=1e-3 * float(a.abs().nan_to_num().max()), equal_nan=True)


def _dirty(tensors: Sequence[torch.Tensor]) -> None:
    """Fill some of the allocator's free blocks of these sizes with the inverted bits of `tensors`."""
    for tensor in tensors:
        if 0 < tensor.nbytes <= 4096:
            content = bytes_of(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())
            blocks = [content.bitwise_not() for _ in range(32)]
            del blocks


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def _fastest(logs: Sequence[OperationLog]) -> OperationLog | None:
    """Return the first of `logs` with the shortest time of each operation; None if their operations differ."""
    first = logs[0]
    if any([o.func for o in log.operations] != [o.func for o in first.operations] for log in logs):
        return None
    rows = zip(*(log.operations for log in logs), strict=True)
    operations = tuple(replace(row[0], seconds=min(o.seconds for o in row)) for row in rows)
    return replace(first, operations=operations)


def _alike(a: Stage, b: Stage, slack: int = 0) -> bool:
    """Whether two stages with the same operations take the same bytes. slack: bytes by which their transients may
    differ, since the allocator may return a larger block than requested."""
    if (a.saved_bytes, a.output_bytes) != (b.saved_bytes, b.output_bytes):
        return False
    forward = abs(a.forward_transient_bytes - b.forward_transient_bytes)
    backward = abs(a.backward_transient_bytes - b.backward_transient_bytes)
    return max(forward, backward) <= slack


def _shifted(found: FoundForms, seconds: float) -> FoundForms:
    """Return the same forms for a stage whose backward takes `seconds` more."""
    forms = tuple(replace(f, backward_time=max(0.0, f.backward_time + seconds)) for f in found.forms)
    return replace(found, forms=forms)
