"""Forms of a stage, measured: what each one stores, what its redo and backward take, in bytes and seconds.

The measured thing is the interpreter itself, running the plan ``F_sel 1 k``, ``B 1`` of a chain of that one stage, so that
times and bytes include all that it does. First each form has to prove itself: what its redo makes is compared bit for bit
with what autograd saved, with whatever nobody should read filled with NaN.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..capture.operations import OperationLog, record_operations
from ..capture.saved_tensors import watch_saved
from ..capture.stage import Behaviour, SavedKind, flatten, pieces
from ..chain import Chain, Form, Stage
from ..runtime.convolutions import Algorithms
from ..runtime.interpreter import Step
from ..runtime.plan import ExecutionPlan, compile_sequence
from ..runtime.replay import ReplayState, Surroundings
from ..runtime.selective import Recipe, redo
from ..sequence import Op, OpKind
from ..sequence import Sequence as Plan
from .allocations import AllocationLog, mark, record
from .conv_forms import beaten_by, convolves, find_conv_forms
from .forms import Choice, Policy, StageGraph, structure, unfit
from .known_times import KnownForms
from .steady import Repeats, Series
from .trial import Run, backward, clock, get_edges, handed_over, ones

T = TypeVar("T")
WORTH = 0.05  # of a stage's saved bytes: a form that frees less is not worth a choice


@dataclass(frozen=True)
class FoundForms:
    """Forms of a stage, smallest last, and how to make them. reason: why there are none, if so."""

    forms: tuple[Form, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    reason: str = ""


class FormMeter:
    """Finds and measures forms on one device; stages of the same structure share the work.

    Args:
        repeats: how often each is timed; the median counts. policy: the user's word on what is kept, if any. partial: whether to
            look for forms that store a part. algorithms: other ones that convolutions may run by (`conv_forms`).
    """

    recorded = 2  # runs under the recorder, of which each operation's faster time counts

    def __init__(
        self,
        device: torch.device,
        repeats: Repeats,
        policy: Policy | None,
        partial: bool = True,
        algorithms: Sequence[Algorithms] = (),
    ) -> None:
        self.device = device
        self.repeats = repeats
        self._policy = policy
        self._partial = partial
        self._algorithms = tuple(algorithms)
        self._shared: dict[Any, tuple[Stage, FoundForms]] = {}

    def find(
        self,
        run: Run,
        costs: Stage,
        behaviour: Behaviour,
        carried: int,
        times: KnownForms | None = None,
    ) -> FoundForms:
        """Forms of the stage `run` whose whole costs are `costs`.

        carried: bytes of the input that its output carries on. times: of its forms, where they are known.
        """
        if times == ():
            return FoundForms(reason="none was found when its times were measured")
        if (reason := unfit(run.stage)) is not None:
            return FoundForms(reason=reason)
        no_parts = "" if self._partial else "switched off"
        if SavedKind.OWN not in behaviour.saved:
            no_parts = "autograd saves nothing that the stage makes"
        if no_parts and not self._algorithms:
            return FoundForms(reason=no_parts)
        try:
            logs = [self._recorded(run) for _ in range(self.recorded)]
        except Exception as error:  # a forward may break in any way under a dispatch mode; the stage works without forms
            return FoundForms(reason=f"its operations could not be recorded ({type(error).__name__}: {error})")
        log = _fastest(logs)
        if log is None or len(log.packs) != len(behaviour.saved):
            return FoundForms(reason="it does other operations when they are recorded")
        key = structure(log, behaviour.saved)
        shared = self._shared.get(key)
        if shared is not None and _alike(shared[0], costs):
            return _moved(shared[1], costs.backward_time - shared[0].backward_time)
        graph = StageGraph(log, behaviour.saved)
        if (reason := graph.refusal()) is not None:
            return FoundForms(reason=reason)
        saved = graph.nbytes(graph.saved - graph.given)
        known = {one.identity: one.seconds for one in times or ()}
        if no_parts:
            choices = []
        elif times is not None:
            choices = [graph.choice(kept) for kept, algorithms in known if not algorithms]
        else:
            choices = [c for c in graph.choices(self._policy) if saved - c.nbytes >= WORTH * costs.saved_bytes]
        pairs, reason = self._measured(run, costs, behaviour, choices, carried, known)
        if self._algorithms and convolves(log):
            smallest = min(pairs, key=lambda pair: pair[0].saved_bytes, default=None)
            worth = WORTH * costs.saved_bytes
            pairs += find_conv_forms(self, run, costs, behaviour, self._algorithms, smallest, carried, known, worth)
        whole = costs.form(0)
        kept = [p for p in pairs if not beaten_by(p[0], [whole, *(f for f, _ in pairs if f is not p[0])])]
        kept.sort(key=lambda pair: -pair[0].saved_bytes)
        if not kept:
            reason = no_parts or reason or "no form is better than keeping everything"
        found = FoundForms(tuple(f for f, _ in kept), tuple(r for _, r in kept), "" if kept else reason)
        self._shared[key] = costs, found
        return found

    def _recorded(self, run: Run) -> OperationLog:
        leaves = run.leaves()
        return record_operations(lambda: flatten(run.forward(leaves))[0], self.device)

    def _measured(
        self,
        run: Run,
        costs: Stage,
        behaviour: Behaviour,
        choices: Sequence[Choice],
        carried: int,
        times: dict[Any, float],
    ) -> tuple[list[tuple[Form, Recipe]], str]:
        """The forms that `choices` make, measured, and why some of them are none."""
        reason = "" if choices else "nothing that could be redone takes enough bytes"
        trials: list[Trial] = []
        for choice in choices:
            if self._proven(run, choice.recipe, behaviour):
                trials.append(self.trial(run, choice.recipe, behaviour))
            else:
                reason = "a redo does not give what the first run gave"
        known = [times.get(trial.recipe.identity) for trial in trials]
        redos = iter(self._redo_seconds(run, [trial for trial, at in zip(trials, known, strict=True) if at is None]))
        pairs: list[tuple[Form, Recipe]] = []
        for trial, seconds in zip(trials, known, strict=True):
            saved_bytes, forward_transient = self.forward_bytes(trial, carried)
            seconds = costs.backward_time + next(redos) if seconds is None else seconds
            form = Form(saved_bytes, seconds, forward_transient, self.backward_peak(trial))
            pairs.append((form, trial.recipe))
        return pairs, reason

    # -- where bytes and contents are seen: here on the device; an estimate has another way

    def record(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        """Call `run` and log what is allocated meanwhile."""
        return record(run, self.device)

    def mark(self, name: str) -> None:
        """Leave a mark in the log being recorded."""
        mark(name)

    def _address(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def _proven(self, run: Run, recipe: Recipe, behaviour: Behaviour) -> bool:
        """Whether a redo makes, bit for bit, what autograd saved in the first run."""
        return _faithful(run, recipe, behaviour, self.device)

    # -- costs

    def trial(self, run: Run, recipe: Recipe, behaviour: Behaviour) -> Trial:
        """A form of a stage, to be run."""
        return Trial(run, recipe, behaviour, self.device)

    def forward_bytes(self, trial: Trial, carried: int) -> tuple[int, int]:
        """(saved bytes, forward transient bytes)."""
        (outputs, step), log = self.record(trial.forward)
        live = log.live()
        kept = {self._address(t) for t in (*outputs, *step.stored(1))}
        saved = sum(size for ptr, size in live.items() if ptr in kept)
        return saved + carried, max(0, log.peak() - sum(live.values()) - carried)

    def backward_peak(self, trial: Trial) -> int:
        """Bytes above what ā and δ_i hold while ``B`` runs, its redo included; as `Meter` counts them."""

        def step() -> tuple[torch.Tensor | None, ...]:
            outputs, _ = trial.forward()
            start = handed_over(outputs, ones(outputs))
            self.mark("backward")
            del outputs
            return backward(*start, trial.targets())

        hooks = [p.register_hook(lambda _, n=n: self.mark(str(n))) for n, p in enumerate(trial.parameters)]
        try:
            grads, log = self.record(step)
        finally:
            for hook in hooks:
                hook.remove()
        fresh = grads[len(grads) - len(trial.parameters) :]
        return log.after("backward").peak(
            {self._address(piece): str(n) for n, g in enumerate(fresh) if g is not None for piece in pieces(g)}
        )

    def _redo_seconds(self, run: Run, trials: Sequence[Trial]) -> list[float]:
        """Of each trial, the median seconds that its ``B`` takes more than the one of everything kept.

        The two run in turn, and it is the differences that count: with times from different moments of a busy machine a redo
        might seem to take less than nothing.
        """
        if not trials:
            return []
        ticks = clock(self.device)
        width = 1 + len(trials)

        def more_than_whole() -> list[Series]:
            spans = ticks.spans()[0::2]
            rounds = [spans[n : n + width] for n in range(0, len(spans) - width + 1, width)]
            whole = statistics.median(one[0] for one in rounds)
            return [Series([one[n] - one[0] for one in rounds], whole) for n in range(1, width)]

        for _ in self.repeats.rounds(more_than_whole):
            leaves = run.leaves()
            outputs = flatten(run.forward(leaves))[0]
            self._timed_backward(ticks, outputs, run.targets(leaves))
            for trial in trials:
                outputs, _ = trial.forward()
                self._timed_backward(ticks, outputs, trial.targets())
        return [max(0.0, statistics.median(series.seconds)) for series in more_than_whole()]

    @staticmethod
    def _timed_backward(ticks: Any, outputs: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        edges, gradients = get_edges(outputs), ones(outputs)
        outputs.clear()  # as the interpreter does when B begins
        ticks.tick()
        backward(edges, gradients, targets)
        ticks.tick()


class Trial:
    """One form of one stage, run by the interpreter."""

    def __init__(self, run: Run, recipe: Recipe, behaviour: Behaviour, device: torch.device) -> None:
        self._run = run
        self.recipe = recipe
        self._behaviour = replace(behaviour, forms=(recipe,))
        self.device = device
        self._plan, self._again = _plan_of_one(), _plan_of_one(Op(OpKind.F_CK, 1))
        self._leaves: list[torch.Tensor] = []
        self.parameters = run.parameters

    def forward(self, again: bool = False) -> tuple[list[torch.Tensor], Step]:
        """``F_sel``: the outputs, and the step that waits for their gradients. again: ``F_ck``; the step will do ``F_sel``."""
        self._leaves = self._run.leaves()
        step = Step(
            self._again if again else self._plan, [self._run.stage], [self._behaviour], self.device, None, lambda _: None
        )
        return flatten(step.forward(self._run.rebuild(self._leaves)))[0], step

    def targets(self) -> list[torch.Tensor]:
        """What the backward of the last forward gives gradients of; parameters come last."""
        return self._run.targets(self._leaves)


def _plan_of_one(*before: Op) -> ExecutionPlan:
    chain = Chain((Stage(forms=(Form(0, 0.0),)),), 1.0, 1.0)
    return compile_sequence(chain, Plan((*before, Op(OpKind.F_SEL, 1, 1), Op(OpKind.B, 1))))


def _faithful(run: Run, recipe: Recipe, behaviour: Behaviour, device: torch.device) -> bool:
    """Whether a redo makes, bit for bit, what autograd saved in the first run."""
    state = ReplayState(Surroundings(device), behaviour.changed_buffers)
    saved: list[torch.Tensor] = []
    with watch_saved(lambda t: saved.append(t.detach())):
        run.forward(run.leaves())
    if len(saved) != len(behaviour.saved):
        return False
    differ = False
    count = 0

    def compare(tensor: torch.Tensor) -> None:
        nonlocal count, differ
        if behaviour.saved[count] is SavedKind.OWN and not _same_bits(tensor.detach(), saved[count]):
            differ = True
        count += 1

    stored = {n: saved[n] for n in recipe.kept}
    leaves = run.leaves()
    try:
        redo(recipe, lambda: run.forward(leaves), stored, compare, state, poison=True)
    except Exception:  # an index out of range, say, where something read what nobody should
        return False
    return not differ


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


def _alike(a: Stage, b: Stage) -> bool:
    names = ("saved_bytes", "output_bytes", "forward_transient_bytes", "backward_transient_bytes")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _moved(found: FoundForms, seconds: float) -> FoundForms:
    """The same forms on a stage whose backward takes `seconds` more."""
    forms = tuple(replace(f, backward_time=max(0.0, f.backward_time + seconds)) for f in found.forms)
    return replace(found, forms=forms)
