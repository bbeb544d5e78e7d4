"""Forms of a stage, found and measured: what each one stores, what its redo and backward take, in bytes and seconds.

First each form has to prove itself: what its redo makes is compared bit for bit with what autograd saved, with whatever
nobody should read filled with NaN. What it takes is measured as the interpreter runs it (`form_trial`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch

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
from ..timing.convergence import Series
from ..timing.harness import Run
from ..timing.stage_timing import Clock
from ..timing.timing_cache import KnownForms
from .conv_forms import beaten_by, convolves, find_conv_forms
from .variant_run import VariantRun, WholeStage
from .variants import Choice, Policy, StageGraph, structure, unfit


@dataclass(frozen=True)
class FoundForms:
    """Forms of a stage, smallest last, and how to make them. reason: why there are none, if so."""

    forms: tuple[Form, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    reason: str = ""


class FormMeter:
    """Finds and measures forms on one bench; stages of the same structure share the work.

    Args:
        policy: the user's word on what is kept, if any. partial: whether to look for forms that store a part.
            algorithms: other ones that convolutions may run by (`conv_forms`).
    """

    recorded = 2  # runs under the recorder, of which each operation's faster time counts

    def __init__(
        self,
        bench: MeasurementContext,
        policy: Policy | None,
        partial: bool = True,
        algorithms: Sequence[Algorithms] = (),
    ) -> None:
        self.bench = bench
        self._policy = policy
        self._partial = partial
        self._algorithms = tuple(algorithms)
        self._shared: dict[Any, tuple[Stage, FoundForms]] = {}

    def find(
        self, stage: WholeStage, times: KnownForms | None = None, recorded: OperationLog | None = None
    ) -> FoundForms:
        """Forms of `stage`. times: of its forms, where they are known. recorded: its operations, where they are."""
        try:
            return self._found(stage, times, recorded)
        except torch.OutOfMemoryError:  # a form beside what it is compared with takes more than the stage's step does
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
        if no_parts and not self._algorithms:
            return FoundForms(reason=no_parts)
        try:
            logs = [recorded] if recorded is not None else []
            while len(logs) < (self.recorded if times is None else 1):
                logs.append(self.bench.recorded(run))
        # a forward may break in any way under a dispatch mode; the stage works without forms
        except Exception as error:
            return FoundForms(reason=f"its operations could not be recorded ({type(error).__name__}: {error})")
        log = _fastest(logs)
        if log is None or len(log.packs) != len(behaviour.saved):
            return FoundForms(reason="it does other operations when they are recorded")
        key = structure(log, behaviour.saved)
        shared = self._shared.get(key)
        blocks = len(behaviour.saved) + len(log.operations) if self.bench.device.type == "cuda" else 0
        if shared is not None and _alike(shared[0], costs, blocks * UNSPLIT):
            return _moved(shared[1], costs.backward_time - shared[0].backward_time)
        graph = StageGraph(log, behaviour.saved)
        if (reason := graph.refusal()) is not None:
            return FoundForms(reason=reason)
        known = {one.identity: one.seconds for one in times or ()}
        choices = [] if no_parts else self._choices(stage, graph, known)
        pairs, reason = self._measured(stage, choices, known)
        if self._algorithms and convolves(log):
            smallest = min(pairs, key=lambda pair: pair[0].saved_bytes, default=None)
            pairs += find_conv_forms(self.bench, stage, self._algorithms, smallest, known)
        pairs = [pair for pair in pairs if not known or pair[1].identity in known]
        whole = costs.form(0)
        kept = [p for p in pairs if not beaten_by(p[0], [whole, *(f for f, _ in pairs if f is not p[0])])]
        kept.sort(key=lambda pair: -pair[0].saved_bytes)
        if not kept:
            reason = no_parts or reason or "no form is better than keeping everything"
        found = FoundForms(tuple(f for f, _ in kept), tuple(r for _, r in kept), "" if kept else reason)
        self._shared[key] = costs, found
        return found

    def _choices(self, stage: WholeStage, graph: StageGraph, known: dict[Any, float]) -> list[Choice]:
        """What to store in a form that stores a part. known: seconds of the stage's forms, if they are."""
        if known:
            own = {n for n, kind in enumerate(stage.behaviour.saved) if kind is SavedKind.OWN}
            # a form with other algorithms may be known where the one that it is based on was left out
            chosen = [graph.choice(kept) for kept in dict.fromkeys(kept for kept, _ in known) if own > set(kept)]
            return [choice for choice in chosen if choice is not None]
        saved = graph.nbytes(graph.saved - graph.given)
        return [c for c in graph.choices(self._policy) if saved - c.nbytes >= stage.worth]

    def _measured(
        self, stage: WholeStage, choices: Sequence[Choice], times: dict[Any, float]
    ) -> tuple[list[tuple[Form, Recipe]], str]:
        """The forms that `choices` make, measured, and why some of them are none. times: if any are known, the others
        are not measured, and count as 0."""
        if not choices:
            return [], "nothing that could be redone takes enough bytes"
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
            pairs.append((VariantRun(stage, choice.recipe, self.bench).costs(seconds), choice.recipe))
        return pairs, "" if len(pairs) == len(choices) else "a redo does not give what the first run gave"

    def _redo_seconds(self, stage: WholeStage, recipes: Sequence[Recipe]) -> list[float | None]:
        """Of each recipe the median seconds of its redo; None where that does not make what the first run made. An
        estimate has another way."""
        run, repeats = stage.run, self.bench.repeats.at_least(2)
        behaviour = stage.behaviour
        # as it is before the run that is compared with
        state = ReplayState(Generators(self.bench.device), behaviour.changed_buffers, behaviour.changed_attributes)
        saved = _saved(run)
        proven = [_faithful(stage, recipe, saved, state) for recipe in recipes]
        if not any(proven):
            return [None] * len(recipes)
        ticks = Clock(self.bench.device)

        def series() -> list[Series]:
            spans = ticks.spans()[0::2]
            return [Series(spans[n :: sum(proven)], stage.costs.backward_time) for n in range(sum(proven))]

        for _ in repeats.rounds(series):
            for recipe in compress(recipes, proven):
                forward = partial(run.forward, run.leaves())
                stored = {n: saved[n] for n in recipe.kept}
                redone: list[torch.Tensor] = []
                keep = partial(_keep, redone)  # as long as in a step
                ticks.tick()
                redo(recipe, forward, stored, keep, state.again())
                ticks.tick()
        medians = (statistics.median(one.seconds) for one in series())
        return [next(medians) if one else None for one in proven]


def _keep(tensors: list[torch.Tensor], tensor: torch.Tensor) -> None:
    tensors.append(tensor.detach())


def _saved(run: Run) -> list[torch.Tensor]:
    """What autograd saves in a run of the stage."""
    saved: list[torch.Tensor] = []
    with watch_saved(partial(_keep, saved)):
        run.forward(run.leaves())
    return saved


def _faithful(stage: WholeStage, recipe: Recipe, saved: Sequence[torch.Tensor], state: ReplayState) -> bool:
    """Whether a redo makes, bit for bit, what autograd `saved` in the first run, and before it all was as of `state`.

    Where a second plain run does not make the same bits either, there are none to compare with: fused attention saves
    memory that nobody has written (its random state, without dropout), and some kernels add up in any order.
    """
    run, kinds = stage.run, stage.behaviour.saved
    if len(saved) != len(kinds):
        return False
    stored = {n: saved[n] for n in recipe.kept}
    compared = _Compared(saved, kinds)
    leaves = run.leaves()
    try:
        redo(recipe, lambda: run.forward(leaves), stored, compared.look, state.again(), poison=True)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an index out of range, say, where something read what nobody should
        return False
    if not compared.others:
        return True
    if not all(_akin(saved[n], other) for n, other in compared.others.items()):
        return False
    _dirty([saved[n] for n in compared.others])
    again = _Compared(saved, kinds)
    with state.again(), uncached_autocast(), watch_saved(again.look):
        run.forward(run.leaves())
    return compared.others.keys() <= again.others.keys()


class _Compared:
    """Looks at what autograd saves in a later run. others: by number, the stage's own tensors with other bits than in
    the first."""

    def __init__(self, saved: Sequence[torch.Tensor], kinds: Sequence[SavedKind]) -> None:
        self._saved = saved
        self._kinds = kinds
        self._count = 0
        self.others: dict[int, torch.Tensor] = {}

    def look(self, tensor: torch.Tensor) -> None:
        n, self._count = self._count, self._count + 1
        if self._kinds[n] is SavedKind.OWN and not _same_bits(tensor.detach(), self._saved[n]):
            self.others[n] = tensor.detach()


def _akin(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `b` may be the same as `a` but for what nobody wrote (in whole numbers) and for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return True
    return torch.allclose(a, b, rtol=1e-2, atol=1e-3 * float(a.abs().nan_to_num().max()), equal_nan=True)


def _dirty(tensors: Sequence[torch.Tensor]) -> None:
    """Leave some of the allocator's free memory, in blocks as of `tensors`, with other content than theirs, bit by
    bit."""
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
    """The first of `logs` with the least time of each operation; None where they differ."""
    first = logs[0]
    if any([o.func for o in log.operations] != [o.func for o in first.operations] for log in logs):
        return None
    rows = zip(*(log.operations for log in logs), strict=True)
    operations = tuple(replace(row[0], seconds=min(o.seconds for o in row)) for row in rows)
    return replace(first, operations=operations)


def _alike(a: Stage, b: Stage, slack: int = 0) -> bool:
    """Whether stages that do the same take the same bytes. slack: bytes by which what they take while they run may
    differ, since each block that the allocator does not split is larger than asked for by what happened to be there."""
    if (a.saved_bytes, a.output_bytes) != (b.saved_bytes, b.output_bytes):
        return False
    forward = abs(a.forward_transient_bytes - b.forward_transient_bytes)
    backward = abs((a.backward_transient_bytes or 0) - (b.backward_transient_bytes or 0))
    return max(forward, backward) <= slack


def _moved(found: FoundForms, seconds: float) -> FoundForms:
    """The same forms on a stage whose backward takes `seconds` more."""
    forms = tuple(replace(f, backward_time=max(0.0, f.backward_time + seconds)) for f in found.forms)
    return replace(found, forms=forms)
