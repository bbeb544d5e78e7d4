"""Runs a sequence on a model: one method per operation, without decisions.

A stage's first forward runs in the user's own graph under saved-tensor hooks: ``F_all`` keeps what autograd saves,
``F_ck`` and ``F_none`` release it. When the gradient reaches a stage's outputs, the interpreter runs all operations up
to that stage's ``B``. Replays run forwards on detached inputs and fill the same slots again; autograd then runs the
backward. The values that ``B`` drops are released when the next gradient arrives, because all of the stage's backward
has been issued by then. `stage_run` runs one stage, and `values` moves and releases the bytes of values.

Ownership: the graph (slots, hooks) owns the step and never the reverse, so dropping the graph frees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function
from torch.autograd.variable import Variable

from ..capture.course import OUTSIDE, Course
from ..core.sequence import FORWARDS, UPDATES, Op, OpKind, Value, a, abar
from ..errors import ExecutionError
from ..tensors.convolutions import StageAlgorithms, forward_by
from ..tensors.eager_mode import without
from ..tensors.recipe import Recipe
from ..tensors.rng import Generators
from ..tensors.saved_tensors import saved_hooks
from ..tensors.stage import Behaviour, StageModule
from ..tensors.storage import storage_key
from ..tensors.tree import flatten, look_into
from .call_interception import following
from .execution_plan import ExecutionPlan, describe
from .hollowing import empty
from .links.base import Link
from .live import LiveForward
from .memory_check import MemoryChecker
from .placed.brought import bring
from .placed.lending import Lender
from .placed.placement import Placement
from .placed.tensor import PlacedTensor
from .replay import ReplayState
from .stage_run import StageRun
from .stage_tape import StageTape, Var
from .step_times import StepTimes
from .values import Held, HeldValues, Slot, compact

AGAIN = (
    "this step's backward has run already and released its saved tensors; a second one needs retain_graph=True in the"
    " first, and a plan that does not move parameters"
)
GIVEN_UP = "this step was aborted after an error and its saved tensors were released; run the forward again"
SUPERSEDED = (
    "this step was aborted, because another forward began or the optimizer updated the parameters before its backward"
    " ran; run the forward again, and call backward right after it"
)
HELD = -1  # `Step.astray` if all calls were expected, but something held a tensor that no call needed any more
TWICE = (
    "rotoff does not differentiate twice (create_graph=True): it recomputes outside of the graph; use the plain model"
)


class Step:
    """One forward and backward of a chain of stages.

    Args:
        plan: the operations to run. stages, behaviours: one for each stage of the chain.
        link: to the host; None if the plan moves nothing. done: called with the link when a backward has ended.
        checker, times: check and time every operation, unless they are None.
        placement: of the parameters, if the plan moves them.
        take: returns a link for another backward through the same graph; None if the plan moves nothing.
    """

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
        self._readers = plan.readers
        self._stages = stages
        self._behaviours = behaviours
        self._link = link
        self._done = done
        self._take = take
        self._checker = checker
        self._times = times
        self._generators = Generators(device)
        self._algorithms = StageAlgorithms()
        self._held = HeldValues(link)
        self._runs: dict[int, StageRun] = {}
        self._weights: dict[int, PlacedTensor] = {}  # by id, the parameters that the plan brings for the open stage
        self._copies: dict[int, torch.Tensor] = {}  # by id of a parameter, its copy on the device in the forward
        self._lender: Lender | None = None
        self._live: LiveForward | None = None  # while the model's own forward runs
        self._open: Op | None = None  # the forward operation of the open stage
        # of each stage: its outputs with their measured places, and whether each needs a gradient
        self._crossing: dict[int, tuple[list[tuple[Var, int]], list[bool]]] = {}
        # values that stay on the device: the forward took another course, and they exceed their place on the host
        self._too_large: set[Value] = set()
        self.astray: int | None = None  # as of `LiveForward`, or `HELD`
        self.unknown = False  # whether it made calls that were not expected, or held more tensors
        self.more_bytes = 0  # that all values hold on the device after the forward phase, beyond the machine's
        self._outputs: list[tuple[Var, int]] = []  # the outputs of the stage that has just ended
        self._last = len(stages)  # the stage in which the forward ended
        self._next = 0  # index of the next op
        self._backward = 0  # stage whose B autograd is running
        self._again = False  # whether this backward leaves a graph that another one may use
        self._rests = False  # whether a backward has ended and left such a graph
        self._closed = False
        self._failed = False
        self._span: record_function | None = None  # of the running operation, if a profiler is active
        self._why = GIVEN_UP

    # -- the forward phase

    def forward(self, value: Any) -> Any:
        """Run the forward phase on the chain's input, stage by stage; returns the last stage's output, in the user's
        graph."""

        def run(live: LiveForward) -> Any:
            nonlocal value
            for i, stage in enumerate(self._stages, start=1):
                self.enter(i)
                value = stage.run(value)
                self._outputs = live.handed(flatten(value)[0])
            return value

        return self._through(self._live_forward(None, flatten(value)[0]), run, picks=False)

    def follow(self, course: Course, given: list[torch.Tensor], forward: Callable[[], Any]) -> Any:
        """Run the forward phase; `forward` calls the model's own code on the tensors `given`. Returns its result."""

        def run(live: LiveForward) -> Any:
            self.enter(1)
            result = forward()
            self._refuse_given_up()
            live.inside = True
            with without(live):
                live.finish()
                self.astray = HELD if live.astray is None and live.kept_more else live.astray
                self.unknown = live.unknown or live.kept_more
                look_into(result)
                assert self._open is not None
                self._outputs = live.results(result, self._open.stage)
            return result

        return self._through(self._live_forward(course, given), run, course.picks)

    def _live_forward(self, course: Course | None, given: list[torch.Tensor]) -> LiveForward:
        """Return the mode that records the forward's calls."""
        live = LiveForward(course, self, self._generators, given)
        if self._placement is not None:
            live.lender = self._lender = self._placement.lender()
        return live

    def _through(self, live: LiveForward, run: Callable[[LiveForward], Any], picks: bool) -> Any:
        self._live = live
        self._held[a(0)] = Held((a(0), "input"), [])
        try:
            try:
                with following(live), self._checked():
                    result = run(live)
                    self._refuse_given_up()
                self._leave()
            finally:
                if self._open is not None:
                    self._runs[self._open.stage].cease()
                live.forget()
                self._copies.clear()
            while self._next < self._plan.forward_end:
                self._execute_or_skip()
            if self.unknown or picks:
                staying = [tensor for run in self._runs.values() for tensor in run.kept.values()]
                self.more_bytes = self._held.device_bytes(staying) - self._plan.held_bytes
            return result
        except BaseException:
            self._give_up()
            raise
        finally:
            self._live = None

    def enter(self, stage: int) -> None:
        """The first call of `stage` is about to be made."""
        live = self._live
        assert live is not None
        self._refuse_given_up()
        before, live.inside = live.inside, True
        try:
            with without(live):
                arriving = [] if self._outputs or self._open is None else live.crossing(stage - 1)
                # also enter the stages that the forward leaves out
                while self._open is None or self._open.stage < stage:
                    if self._open is not None:
                        self._outputs = self._outputs or arriving
                        self._leave(None if self._open.stage == stage - 1 else live.made_by(self._open.stage))
                    while (op := self._plan.sequence.ops[self._next]).kind not in FORWARDS or op.stage in self._runs:
                        self._execute(op)
                    self._enter(op, live)
        except BaseException:  # the model may catch the error and go on without a stage
            for run in self._runs.values():
                run.cease()
            self._open = None
            self._give_up()
            raise
        finally:
            live.inside = before

    def _refuse_given_up(self) -> None:
        if self._closed:
            raise ExecutionError(GIVEN_UP)

    def _enter(self, op: Op, live: LiveForward) -> None:
        self._begins(op, self._next)
        i, recipe = op.stage, None
        if op.kind is OpKind.F_SEL:
            form = self._form(op)
            recipe = None if form.complete else form
            live.algorithms = form.algorithms
        behaviour = self._behaviours[i - 1]
        crossing, needs = self._crossing.get(i - 1, ([], []))
        given = self._held[self._held.input_of(i)].tensors()
        tape = StageTape(self._stage_name(i))
        tape.inputs = [var for var, _ in crossing]
        self._bring(i, tape, live)
        for (var, at), now in zip(crossing, given, strict=True):
            live.fill(var, now)
            if at in behaviour.copied and (tensor := var.tensor()) is not None:
                # a view has an autograd node of its own, which runs when the backward leaves the stage
                live.instead[var] = own = tensor.view_as(tensor)
                own.register_hook(compact)
        opaque = i in live.opaque_stages
        replay = ReplayState(
            self._generators,
            behaviour.changed_buffers if opaque else (),
            behaviour.changed_attributes if opaque else (),
            behaviour.modes if opaque else (),
        )
        run = StageRun(i, tape, behaviour, needs, replay)
        self._runs[i] = run
        if self._placement is not None:
            run.brought = {storage_key(copy): self._weights[p] for p, copy in live.brought.items()}
        live.autocast_before = replay.autocast if torch._C._is_any_autocast_enabled() else None
        changed = behaviour.changed_buffers
        live.reads.changing = {id(module._buffers[name]) for module, name in changed} if changed else set()
        live.begin_stage(i, tape, replay.mark)
        kept = self._behaviours[i - 2].kept if i > 1 else ()
        staying = [n for n, (_, at) in enumerate(crossing) if at in kept] if kept else ()
        self._open = op
        run.open(live, given, staying, op.kind in (OpKind.F_ALL, OpKind.F_SEL), recipe, self)

    def _bring(self, i: int, tape: StageTape, live: LiveForward) -> None:
        """Let calls of stage i, and their replays, use the copies on the device of parameters that the plan moves."""
        if self._placement is None:
            return
        live.brought, weights = {}, {}
        for parameter, weight, gradient in self._placement.brought(self._readers.get(i, ())):
            assert weight.device is not None
            weights[id(parameter)] = weight
            copy = self._copies.get(id(parameter))
            if copy is None or storage_key(copy) != storage_key(weight.device):
                # derived from the earlier copy, so that gradients are added up in the order of the plain model
                copy = bring(parameter, weight.device, copy, gradient)
            live.brought[id(parameter)] = self._copies[id(parameter)] = copy
        self._weights = weights
        if weights:
            tape.brought = partial(_content, weights)

    def _let_go(self, k: int) -> None:
        """Free the bytes of the forward's copies of the parameters of group k, which leave the device."""
        assert self._plan.placed is not None
        for parameter in self._plan.placed.groups[k - 1].parameters:
            if (copy := self._copies.get(id(parameter))) is None:
                continue
            if self._live is None or self._live.has_returned(copy):  # the model's own code may hold it
                del self._copies[id(parameter)]
            else:
                empty(copy)

    def _leave(self, made: dict[Var, int] | None = None) -> None:
        """End the open stage. made: the measured places of its own outputs; given if the tensors that it hands on
        are inputs of a later stage than the next."""
        op, live, crossing = self._open, self._live, self._outputs
        self._outputs = []
        assert op is not None
        assert live is not None
        self._open = None
        i = op.stage
        live.instead = {}  # views that hold the input's bytes
        run, behaviour = self._runs[i], self._behaviours[i - 1]
        v = abar(i) if op.kind in (OpKind.F_ALL, OpKind.F_SEL) else a(i)
        if v.saved:
            self._algorithms.ran(i, live.algorithms)
        live.algorithms = None
        outputs, needs, own, kept = [], [], [], []
        for n, (var, at) in enumerate(crossing):
            tensor = var.tensor()
            assert tensor is not None
            if var.stage == i and tensor.grad_fn is not None:
                tensor.register_hook(partial(self.gradient_arrived, i))
            if made is not None:
                at = made.get(var, -1)
            outputs.append(tensor.detach())
            needs.append(tensor.requires_grad)
            own.append(_own(behaviour, at))
            run.tape.outputs.append(var)
            if at in behaviour.kept:
                kept.append(n)
        run.close(outputs, kept)
        run.own = own
        self._crossing[i] = crossing, needs
        self._held[v] = Held((v, self._stage_name(i)), outputs, own, run.saved() if v.saved else [])
        self._held.touch(op, [self._held.input_of(i)] if i > 1 else [], [v])
        if op.kind is OpKind.F_NONE and i > 1:
            self._held.drop(a(i - 1))
            self._hollow(i - 1)
        self._last = i
        self._done_with(op)

    def restore(self, every: Sequence[Var]) -> list[torch.Tensor]:
        """Return the contents of hollow tensors, by one replay of each stage that made them or, if inputs are gone,
        makes a part of these."""
        wanted: dict[int, list[Var]] = {}
        for var in every:
            wanted.setdefault(var.stage, []).append(var)
        content: dict[Var, torch.Tensor] = {}
        last_use = dict.fromkeys(every, len(self._stages) + 1)
        for i in range(max(wanted), OUTSIDE, -1):
            for one in self._runs[i].tape.inputs if i in wanted else ():
                if one in last_use:
                    continue
                last_use[one] = i
                if (tensor := one.tensor()) is None or one.hollow:
                    wanted.setdefault(one.stage, []).append(one)
                else:
                    content[one] = tensor.detach()
        for i in sorted(wanted):
            if i == OUTSIDE:
                assert self._live is not None
                made = self._live.outside.run([], wanted[i])
            else:
                made = self._runs[i].restored([content[one] for one in self._runs[i].tape.inputs], wanted[i])
            content.update(zip(wanted[i], made, strict=True))
            content = {one: tensor for one, tensor in content.items() if last_use[one] > i}
        return [content[var] for var in every]

    def _execute_or_skip(self) -> None:
        """Run the next operation, unless its stage was never entered: a forward that leaves its course may end in an
        earlier stage."""
        op = self._plan.sequence.ops[self._next]
        moves = op.kind not in FORWARDS and op.kind is not OpKind.B
        if op.of or op.kind in UPDATES:
            self._execute(op)
        elif op.stage > self._last or (moves and op.stage == self._last < len(self._stages)):
            self._next += 1
        else:
            self._execute(op)

    # -- the backward phase, which autograd drives

    def gradient_arrived(self, i: int, _gradient: torch.Tensor) -> None:
        """Tensor hook: autograd has the gradient of an output of stage i."""
        self.advance_to(i)

    def input_slots(self, i: int) -> list[Slot]:
        """Return the slots of stage i's input tensors."""
        return self._held[self._held.input_of(i)].outputs

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
        """Return the saved-tensor hooks for a stage's first run."""
        return saved_hooks(pack, unpack)

    def advance_to(self, i: int) -> None:
        """Run all operations before ``B i``, which autograd then runs."""
        if self._backward == i and not self._closed:
            return
        if self._closed or i > self._last:
            raise ExecutionError(self._why if self._failed else AGAIN)
        if torch.is_grad_enabled():
            raise ExecutionError(TWICE)
        try:
            if not self._backward:
                self._begin_pass()
            while True:
                self._end_backward()
                while (op := self._plan.sequence.ops[self._next]).kind is not OpKind.B or op.stage > self._last:
                    self._execute_or_skip()
                self._begin_backward(op)
                if op.stage <= i:
                    break
                if self._placement is None and self._runs[op.stage].has_graph():  # another backward may come for it
                    self._again = True
            if op.stage != i:
                raise ExecutionError(f"a gradient reached stage {i} after the backward of stage {op.stage} had begun")
            if self._runs[i].recipe is not None:
                self._held[abar(i)].check_unmodified()
                self._runs[i].redo(self._held[self._held.input_of(i)].tensors())
            self._algorithms.begin_backward(i)
        except BaseException as error:
            if self._placement is not None:
                self._placement.backward_failed(error)
            self._give_up()
            raise

    def _begin_pass(self) -> None:
        """Autograd has begun a backward. If an earlier one has used the graph, all values are made again."""
        Variable._execution_engine.queue_callback(self._end_pass)
        if self._placement is not None:
            self._placement.backward_begins()
        self._again = self._placement is None and torch._C._autograd._get_current_graph_task_keep_graph()
        if self._rests:
            self._rests = False
            self._link = None if self._take is None else self._take()
            self._held = HeldValues(self._link)
            self._held[a(0)] = Held((a(0), "input"), [])

    def _end_pass(self) -> None:
        """Autograd has ended a backward. Where another one may follow, only the values are released."""
        if self._placement is not None or not (self._again or any(run.has_graph() for run in self._runs.values())):
            self.close()
        elif not self._closed:
            self._release(complete=self._backward == 1)
            for run in self._runs.values():
                run.pause()
            self._rests, self._next, self._backward, self._last = True, 0, 0, max(self._runs)

    def _begin_backward(self, op: Op) -> None:
        i, index = op.stage, self._next
        self._next += 1
        self._backward = i
        self._runs[i].in_backward, self._runs[i].frees = True, self._again
        self._held.touch(op, [abar(i), self._held.input_of(i)], [])
        if i < self._last:
            self._held.consume(abar(i))
        # Only the slots of saved tensors still need the stage's outputs.
        if (made := self._held.pop(a(i), None)) is not None and i < self._last:
            self._held.release(made)
        self._held[abar(i)].settle()
        for slot in self._held[abar(i)].outputs:
            slot.put(None)
        if self._checker is not None:
            self._checker.begin(op)
        self._begins(op, index)

    def _end_backward(self) -> None:
        i = self._backward
        if not i:
            return
        self._algorithms.end_backward()
        self._ended()
        for v in (abar(i), a(i - 1)):
            if v in self._held and v != a(0):
                self._held.release(self._held.pop(v))
        self._held.consumed(i)
        if self._again:
            self._runs[i].pause()
        else:
            self._runs.pop(i).end()

    @property
    def closed(self) -> bool:
        """Whether the backward has run or the step was aborted."""
        return self._closed or self._rests

    def abandon(self) -> None:
        """Abort this step, because another step or an update of the parameters begins."""
        if not self._closed:
            self._why = SUPERSEDED
            self._give_up()

    def _give_up(self) -> None:
        self._failed = True
        self.close()

    def close(self) -> None:
        """Release all that the step holds; may be called again.

        A failed copy raises no error here: it has raised one already if an operation needed its bytes.
        """
        if self._closed:
            return
        self._closed = True
        self._crossing.clear()
        for run in self._runs.values():
            run.end()
        self._runs.clear()
        if self._lender is not None:
            self._lender.close()
            self._lender = None
        complete = self._backward == 1 and not self._failed
        try:
            self._release(complete)
        finally:
            if self._placement is not None and complete:
                self._placement.backward_done(self._plan.sequence.ops[self._next :])
            self._placement = None

    def _release(self, complete: bool) -> None:
        """Release all values and the link. complete: whether the backward ran to its end."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        self._algorithms.end_backward()
        if self._times is not None:
            self._times.close(complete)
        self._times = self._checker = None
        try:
            self._held.give_back()
        finally:
            if self._link is not None:
                self._done(self._link)
                self._link = None

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    # -- operations

    def _execute(self, op: Op) -> None:
        self._begins(op, self._next)
        try:
            with self._checked():
                if op.of or op.kind in UPDATES:
                    assert self._placement is not None, "a plan that moves parameters has a placement"
                    if op.of == "w" and op.kind in (OpKind.FREE, OpKind.DROP):
                        self._let_go(op.stage)
                    self._placement.operate(op)
                else:
                    self._METHODS[op.kind](self, op)
        except Exception as error:
            of_parameters = op.of or op.kind in UPDATES
            what = f"group {op.stage} of the parameters" if of_parameters else f"stage {self._stage_name(op.stage)!r}"
            _note(error, f"rotoff: while running {describe(op, self._next, self._plan.sequence)}, {what}")
            raise
        self._done_with(op)

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
            self._checker.after(op, self._held, [t for run in self._runs.values() for t in run.kept.values()])

    def _f_all(self, op: Op) -> None:
        self._algorithms.plain(op.stage)
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
        place = self._plan.host[self._next]
        base = 0 if self._placement is None else self._placement.base
        self._held.touch(op, [op.value], [])
        if not self._held[op.value].offload(self._need_link(), base + place.offset, place.room):
            self._too_large.add(op.value)
        elif self._times is not None:
            self._times.copy(self._next, self._held[op.value].offloaded)

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

    _METHODS = {
        OpKind.F_ALL: _f_all,
        OpKind.F_SEL: _f_sel,
        OpKind.F_CK: _f_ck,
        OpKind.F_NONE: _f_none,
        OpKind.OFFLOAD: _offload,
        OpKind.FREE: _free,
        OpKind.PREFETCH: _prefetch,
        OpKind.WAIT: _wait,
        OpKind.DROP: _drop,
    }

    def _forward(self, op: Op, keep: bool, recipe: Recipe | None) -> None:
        """Run stage i again. keep: keep what autograd saves; only a part of it if `recipe` is given."""
        i = op.stage
        source = self._held.input_of(i)
        given = self._held[source].tensors()
        outputs = self._runs[i].again(given, keep, recipe, alone=self._next in self._plan.early)
        v = abar(i) if keep else a(i)
        if (held := self._held.get(v)) is not None:
            held.refill(outputs)
        else:
            own = self._runs[i].own if outputs else ()
            self._held[v] = Held((v, self._stage_name(i)), outputs, own, self._runs[i].saved() if keep else [])
        self._held.touch(op, [source], [v])

    # -- small things

    def stored(self, i: int) -> list[torch.Tensor]:
        """Return the tensors that a smaller form of stage i stores now, beyond its outputs."""
        return [slot.tensor for slot in self._runs[i].stored.values() if slot.tensor is not None]

    def _hollow(self, i: int) -> None:
        """Hollow stage i's outputs in the model's own code, too, while its forward runs."""
        if any((held := self._held.get(v)) is not None and held.on_device for v in (a(i), abar(i))):
            return
        if self._live is not None and (self._live.fills or i + 1 not in self._runs):
            onward = {var for var, _ in self._crossing.get(i + 1, ((), ()))[0]}
            for var, at in self._crossing.get(i, ((), ()))[0]:
                if var not in onward and _own(self._behaviours[i - 1], at):
                    self._live.hollow(var)

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


def _own(behaviour: Behaviour, at: int) -> bool:
    """Whether the output at place `at` has bytes of its own; assumed so if it was not measured."""
    return not 0 <= at < len(behaviour.own_outputs) or behaviour.own_outputs[at]


def _content(weights: dict[int, PlacedTensor]) -> dict[int, torch.Tensor]:
    """Return, by id of a parameter, its copy on the device for a replay."""
    found = {}
    for key, weight in weights.items():
        parameter = weight.get()
        if weight.device is not None and parameter is not None:
            found[key] = weight.device.detach().requires_grad_(parameter.requires_grad)
    return found
