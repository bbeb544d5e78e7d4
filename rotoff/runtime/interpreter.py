"""Runs the operations of a sequence on a model: one method for each, without decisions.

`step` runs a stage's first forward in the user's own graph; `backward_phase` runs, when the gradient reaches a stage's
outputs, all operations up to its ``B``. `stage_run` runs one stage, and `values` moves and releases the bytes of
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

from ..core.sequence import FORWARDS, UPDATES, Op, OpKind, Value, a, abar
from ..errors import ExecutionError
from ..tensors.convolutions import StageAlgorithms, forward_by
from ..tensors.recipe import Recipe
from ..tensors.rng import Generators
from ..tensors.stage import Behaviour, StageModule
from ._follow import Var
from .execution_plan import ExecutionPlan, describe
from .hollowing import empty
from .links.base import Link
from .live import LiveForward
from .memory_check import MemoryChecker
from .placed.placement import Placement
from .stage_run import StageRun
from .step_times import StepTimes
from .values import Held, HeldValues, as_made


class Interpreter:
    """Runs the operations of one step, in order.

    Args:
        plan: the operations. stages, behaviours: one for each stage of the chain.
        link: to the host; None if the plan moves nothing. done: called with the link when a backward has ended.
        checker, times: check and time every operation, unless they are None.
        placement: of the parameters, if the plan moves them.
        take: returns a link for another backward through the same graph; None if the plan moves nothing.

    Attributes:
        more_bytes: what a value on the host, or all values on the device after the forward phase, take beyond the
            machine's.
    """

    more_bytes = 0

    def __init__(
        self,
        plan: ExecutionPlan,
        stages: Sequence[StageModule],
        behaviours: Sequence[Behaviour],
        device: torch.device,
        link: Link | None,
        done: Callable[[Link], None],
        checker: MemoryChecker | None = None,
        times: StepTimes | None = None,
        placement: Placement | None = None,
        take: Callable[[], Link] | None = None,
    ) -> None:
        self._plan = plan
        self._placement = placement
        self._stages = stages
        self._behaviours = behaviours
        self.device = device
        self._link = link
        self._done = done
        self._take = take
        self._generators = Generators(device)
        self._checker = checker
        self._times = times
        self._algorithms = StageAlgorithms()
        self._held = HeldValues(link)
        self._runs: dict[int, StageRun] = {}
        self._copies: dict[int, torch.Tensor] = {}  # by id of a parameter, its copy on the device in the forward
        self._live: LiveForward | None = None  # while the model's own forward runs
        # of each stage: its outputs with their measured places, and whether each needs a gradient
        self._crossing: dict[int, tuple[Sequence[tuple[Var, int]], list[bool]]] = {}
        # values that stay on the device: larger than their place on the host, which has no other for them
        self._too_large: set[Value] = set()
        self._behind = 0  # the end of values that are larger than their place on the host
        self._last = len(stages)  # the stage in which the forward ended
        self._next = 0  # index of the next op
        self._span: record_function | None = None  # of the running operation, if a profiler is active
        self._closed = False

    # -- one method for each operation, named after its `OpKind`

    def _f_all(self, op: Op) -> None:
        self._algorithms.ran(op.stage, None)
        self._forward(op, True, None)

    def _f_ck(self, op: Op) -> None:
        self._forward(op, False, None)

    def _f_none(self, op: Op) -> None:
        self._forward(op, False, None)
        if op.stage > 1:
            self._held.drop(a(op.stage - 1))
            self._hollow(op.stage - 1)

    def _f_sel(self, op: Op) -> None:
        form = self._form(op)
        with forward_by(form.algorithms):
            self._forward(op, True, None if form.complete else form)
        self._algorithms.ran(op.stage, form.algorithms)

    def _form(self, op: Op) -> Recipe:
        recipes = self._behaviours[op.stage - 1].forms
        if op.form > len(recipes):
            raise ExecutionError(
                f"stage {self._stage_name(op.stage)!r} has {len(recipes)} smaller forms on this machine, no form"
                f" {op.form}; call measure() again"
            )
        return recipes[op.form - 1]

    def _offload(self, op: Op) -> None:
        self._held.touch(op, [op.value], [])
        if not self._held[op.value].offload(self._need_link(), self._place):
            self._too_large.add(op.value)
        elif self._times is not None:
            self._times.copy(self._next, self._held[op.value].offloaded)

    def _place(self, size: int) -> int | None:
        """Return where on the host the value of this operation goes; None if it has to stay on the device. Values that
        the step's data made larger than they were when measured go behind all others."""
        place = self._plan.host[self._next]
        base, others = (0, 0) if self._placement is None else (self._placement.base, self._placement.end)
        if size <= place.room:
            return base + place.offset
        self.more_bytes = max(self.more_bytes, size - place.room)
        if self._live is not None and self._live.astray is not None:
            return None
        start = max(base + self._plan.host_bytes, others, self._behind)
        try:
            self._need_link().reserve(start + size)
        except ExecutionError:  # the host is full; the step is correct all the same
            return None
        self._behind = start + size
        return start

    def _free(self, op: Op) -> None:
        if op.value in self._too_large:
            return
        self._held[op.value].check_unmodified()
        self._held.release(self._held[op.value])
        self._hollow(op.stage)

    def _prefetch(self, op: Op) -> None:
        if op.value in self._too_large:
            return
        self._held[op.value].prefetch(self._need_link())
        if self._times is not None:
            self._times.copy(self._next, self._held[op.value].tickets[-1][1])

    def _wait(self, op: Op) -> None:
        self._held[op.value].settle()

    def _drop(self, op: Op) -> None:
        self._held.drop(op.value)
        self._hollow(op.stage)

    def _forward(self, op: Op, keep: bool, recipe: Recipe | None) -> None:
        """Run stage i again. keep: keep what autograd saves; only a part of it if `recipe` is given."""
        i = op.stage
        source = self._held.input_of(i)
        given = as_made(self._held[source].outputs, self._stage_name(i))
        outputs = self._runs[i].again(given, keep, recipe, alone=self._next in self._plan.early)
        v = abar(i) if keep else a(i)
        if (held := self._held.get(v)) is not None:
            held.refill(outputs)
        else:
            own = self._runs[i].own if outputs else ()
            self._held[v] = Held((v, self._stage_name(i)), outputs, own, self._runs[i].saved() if keep else [])
        self._held.touch(op, [source], [v])
        if i == self._last and self._live is None:
            self._let_result_go()

    # -- before and after an operation

    def _execute(self, op: Op) -> None:
        self._begins(op, self._next)
        of_parameters = op.of or op.kind in UPDATES
        try:
            with self._checked():
                if of_parameters:
                    assert self._placement is not None, "a plan that moves parameters has a placement"
                    if op.of == "w" and op.kind in (OpKind.FREE, OpKind.DROP):
                        self._let_go(op.stage)
                    self._placement.operate(op)
                else:
                    getattr(self, f"_{op.kind.name.lower()}")(op)
        except Exception as error:
            what = f"group {op.stage} of the parameters" if of_parameters else f"stage {self._stage_name(op.stage)!r}"
            _note(error, f"rotoff: while running {describe(op, self._next, self._plan.sequence)}, {what}")
            raise
        self._done_with(op)

    def _execute_or_skip(self) -> None:
        """Run the next operation, unless its stage was never entered: a forward that leaves its course may end in an
        earlier stage."""
        op = self._plan.sequence.ops[self._next]
        moves = op.kind not in FORWARDS and op.kind is not OpKind.B
        beyond = op.stage > self._last or (moves and op.stage == self._last < len(self._stages))
        if beyond and not (op.of or op.kind in UPDATES):
            self._next += 1
        else:
            self._execute(op)

    def _checked(self) -> AbstractContextManager[object]:
        return nullcontext() if self._checker is None else self._checker.watching()

    def _begins(self, op: Op, index: int) -> None:
        if self._times is not None:
            self._times.begin(index)
        if torch.autograd._profiler_enabled():
            self._span = record_function(f"rotoff: {op}")
            self._span.__enter__()

    def _ended(self) -> None:
        if self._span is not None:
            span, self._span = self._span, None
            span.__exit__(None, None, None)
        if self._times is not None:
            self._times.end()

    def _done_with(self, op: Op) -> None:
        self._next += 1
        self._ended()
        if self._checker is not None:
            if self._live is not None and self._live.astray is not None:
                self._checker.leave_course()
            self._checker.after(op, self._held, self._kept())

    # -- small things

    def _let_result_go(self) -> None:
        """Hold nothing of what the model returns: only the caller needs it, who may drop it before the backward."""
        for v in (a(self._last), abar(self._last)):
            for slot in self._held[v].outputs if v in self._held else ():
                slot.put(None)

    def _let_go(self, k: int) -> None:
        """Free the bytes of the forward's copies of the parameters of group k, which leave the device."""
        assert self._plan.placed is not None
        for parameter in self._plan.placed.groups[k - 1].parameters:
            if (copy := self._copies.get(id(parameter))) is None:
                continue
            if self._live is None or self._live.has_returned(copy):  # the model's own code may hold it
                del self._copies[id(parameter)]
                if self._live is not None:
                    self._live.newest.pop(id(parameter), None)
            else:
                empty(copy)

    def _hollow(self, i: int) -> None:
        """Hollow stage i's outputs in the model's own code, too, while its forward runs."""
        if any((held := self._held.get(v)) is not None and held.on_device for v in (a(i), abar(i))):
            return
        if self._live is not None and (self._live.fills or i + 1 not in self._runs):
            onward = {var for var, _ in self._crossing.get(i + 1, ((), ()))[0]}
            for var, at in self._crossing.get(i, ((), ()))[0]:
                if var not in onward and has_own_bytes(self._behaviours[i - 1], at):
                    self._live.frames.hollow(var)

    def _kept(self) -> list[torch.Tensor]:
        """Return the tensors in skip connections that are kept in place."""
        return [slot.tensor for run in self._runs.values() for slot in run.kept.values() if slot.tensor is not None]

    def _need_link(self) -> Link:
        assert self._link is not None, "a plan that moves values needs a link"
        return self._link

    def _stage_name(self, i: int) -> str:
        return self._stages[i - 1].name if i else "input"


def _note(error: Exception, text: str) -> None:
    """Add `text` to an error, whose type stays because the user may be catching it."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = f"{error.args[0]}\n{text}", *error.args[1:]


def has_own_bytes(behaviour: Behaviour, at: int) -> bool:
    """Whether the output at place `at` has bytes of its own; assumed so if it was not measured."""
    return not 0 <= at < len(behaviour.own_outputs) or behaviour.own_outputs[at]
