"""Runs a sequence on a model: one method per operation, and no decisions.

A stage's first forward runs in the user's own graph under saved-tensor hooks: ``F_all`` keeps what autograd saves,
``F_ck`` and ``F_none`` let it go. When the gradient reaches a stage's outputs, the interpreter runs all operations up to
that stage's ``B``, replaying forwards on detached inputs to fill the same slots again; autograd then does the backward.
What ``B`` drops goes when the next gradient arrives, for then all of the stage's backward has been issued. How one stage
runs is `stage_run`'s matter, and what becomes of a value's bytes that of `values`.

Ownership: the graph (slots, hooks) owns the step and never the reverse, so that dropping the graph frees everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.variable import Variable

from ..capture.stage import Behaviour, StageModule, flatten, storage_key
from ..errors import ExecutionError
from ..sequence import Op, OpKind, a, abar
from .check import Checker
from .convolutions import StageAlgorithms
from .link import Link
from .plan import ExecutionPlan, describe
from .replay import ReplayState, Surroundings
from .selective import Recipe
from .stage_run import Rebuild, StageRun
from .step_times import StepTimes
from .values import Held, HeldValues, Slot, compact

AGAIN = (
    "this step's backward has run already and rotoff keeps nothing for a second one (retain_graph=True, or two losses of"
    " one forward); add the losses up, or run the forward again"
)
GIVEN_UP = "this step was given up after an error and rotoff keeps nothing of it; run the forward again"
IN_PART = (
    "the gradient of an intermediate result is asked for (retain_grad, or a hook on a tensor that the model returns), of which"
    " rotoff has only what the loss adds there; take it by register_full_backward_hook of the module that makes it, or use the"
    " plain model"
)
TWICE = "rotoff does not differentiate twice (create_graph=True): it recomputes outside of the graph; use the plain model"


class Step:
    """One forward and backward of a chain of stages.

    Args:
        plan: what to do. stages, behaviours: one for each stage of the chain. link: to the host, None where nothing moves.
        done: called once with the link when the step needs it no more. checker, times: told of every operation, if any.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        stages: Sequence[StageModule],
        behaviours: Sequence[Behaviour],
        device: torch.device,
        link: Link | None,
        done: Callable[[Link], None],
        checker: Checker | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._behaviours = behaviours
        self._link = link
        self._done = done
        self._checker = checker
        self._times = times
        self._surroundings = Surroundings(device)
        self._algorithms = StageAlgorithms()
        self._held = HeldValues(link)
        self._runs: dict[int, StageRun] = {}
        self._edges: dict[int, list[torch.Tensor]] = {}  # outputs in the user's graph that the next stage has yet to take
        self._returned: list[weakref.ref[torch.Tensor]] = []  # outputs of the model that are intermediate results too
        self._rebuild: Rebuild  # what makes one value of those
        self._next = 0  # index of the next op
        self._backward = 0  # stage whose B autograd is running
        self._closed = False
        self._failed = False

    # -- the forward phase

    def forward(self, value: Any) -> Any:
        """Run the forward phase on the chain's input; returns the last stage's output, in the user's graph."""
        self._edges[0], self._rebuild = flatten(value)
        self._held[a(0)] = Held((a(0), "input"), [t.detach() for t in self._edges[0]])
        try:
            while self._next < self._plan.forward_end:
                self._execute(self._plan.sequence.ops[self._next])
            self._returned = self._runs[len(self._stages)].handed_on
            return self._rebuild(self._edges.pop(len(self._stages)))
        except BaseException:
            self._give_up()
            raise

    # -- the backward phase, which autograd drives

    def gradient_arrived(self, i: int, _gradient: torch.Tensor) -> None:
        """Autograd has a gradient of an output of stage i."""
        self.advance_to(i)

    def input_slots(self, i: int) -> list[Slot]:
        """Where the tensors of stage i's input are."""
        return self._held[self._held.input_of(i)].outputs

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
        """What a stage's first run is under."""
        return saved_tensors_hooks(pack, unpack)

    def advance_to(self, i: int) -> None:
        """Run all operations up to ``B i`` and let autograd do that one."""
        if self._backward == i and not self._closed:
            return
        if self._closed:
            raise ExecutionError(GIVEN_UP if self._failed else AGAIN)
        if torch.is_grad_enabled():
            raise ExecutionError(TWICE)
        try:
            if not self._backward:
                self._refuse_parts()
                Variable._execution_engine.queue_callback(self.close)
            while True:
                self._end_backward()
                while (op := self._plan.sequence.ops[self._next]).kind is not OpKind.B:
                    self._execute(op)
                self._begin_backward(op)
                if op.stage <= i:
                    break
            if op.stage != i:
                raise ExecutionError(f"a gradient reached stage {i} after the backward of stage {op.stage} had begun")
            if self._runs[i].recipe is not None:
                self._held[abar(i)].check_unmodified()
                self._runs[i].redo(self._held[self._held.input_of(i)].tensors())
            self._algorithms.begin_backward(i)
        except BaseException:
            self._give_up()
            raise

    def _refuse_parts(self) -> None:
        for ref in self._returned:
            tensor = ref()
            if tensor is not None and (
                tensor.retains_grad or len(tensor._backward_hooks or ()) > 1
            ):  # one is `gradient_arrived`
                raise ExecutionError(IN_PART)

    def _begin_backward(self, op: Op) -> None:
        i, index = op.stage, self._next
        self._next += 1
        self._backward = i
        self._runs[i].in_backward = True
        self._held.touch(op, [abar(i), self._held.input_of(i)], [])
        if i < len(self._stages):
            self._held.consume(abar(i))
        # The stage's outputs have no reader left but the slots that saved them.
        if (made := self._held.pop(a(i), None)) is not None and i < len(self._stages):
            self._held.release(made)
        self._held[abar(i)].settle()
        for slot in self._held[abar(i)].outputs:
            slot.put(None)
        if self._checker is not None:
            self._checker.begin(op)
        if self._times is not None:
            self._times.begin(index)

    def _end_backward(self) -> None:
        i = self._backward
        if not i:
            return
        self._algorithms.end_backward()
        if self._times is not None:
            self._times.end()
        for v in (abar(i), a(i - 1)):
            if v in self._held and v != a(0):
                self._held.release(self._held.pop(v))
        self._held.consumed(i)
        self._runs.pop(i).end()

    def _give_up(self) -> None:
        self._failed = True
        self.close()

    def close(self) -> None:
        """Give back all that the step holds; harmless when repeated.

        A copy that failed is no error any more: whoever needed its bytes has been told.
        """
        if self._closed:
            return
        self._closed = True
        self._algorithms.end_backward()
        if self._times is not None:
            self._times.close(complete=self._backward == 1 and not self._failed)
        self._edges.clear()
        for run in self._runs.values():
            run.end()
        self._runs.clear()
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
        if self._times is not None:
            self._times.begin(self._next)
        try:
            self._METHODS[op.kind](self, op)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11; the type stays what the user may be catching
                where = describe(op, self._next, self._plan.sequence)
                error.add_note(f"rotoff: while running {where}, stage {self._stage_name(op.stage)!r}")
            raise
        self._next += 1
        if self._times is not None:
            self._times.end()
        if self._checker is not None:
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
        recipes = self._behaviours[op.stage - 1].forms
        if op.form > len(recipes):
            raise ExecutionError(
                f"stage {self._stage_name(op.stage)!r} has {len(recipes)} smaller forms on this machine, no form {op.form};"
                " call measure() again"
            )
        form = recipes[op.form - 1]
        with self._algorithms.forward(op.stage, form.algorithms):
            self._forward(op, True, None if form.complete else form)

    def _offload(self, op: Op) -> None:
        place = self._plan.host[self._next]
        self._held.touch(op, [op.value], [])
        self._held[op.value].offload(self._need_link(), place.offset, place.room)
        if self._times is not None:
            self._times.copy(self._next, self._held[op.value].offloaded)

    def _free(self, op: Op) -> None:
        self._held[op.value].check_unmodified()
        self._held.release(self._held[op.value])
        self._hollow(op.stage)

    def _prefetch(self, op: Op) -> None:
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
        """Run stage i; what autograd saves is kept where `keep`, in part where a `recipe` says which part."""
        i = op.stage
        source = self._held.input_of(i)
        given = self._held[source].tensors()
        if i in self._runs:
            outputs = self._runs[i].again(given, keep, recipe, alone=self._next in self._plan.closing)
        else:
            outputs = self._first(i, given, keep, recipe)
        v = abar(i) if keep else a(i)
        if (held := self._held.get(v)) is not None:
            held.refill(outputs)
        else:
            own = self._behaviours[i - 1].own_outputs if outputs else ()
            self._held[v] = Held((v, self._stage_name(i)), outputs, own, self._runs[i].saved() if keep else [])
        self._held.touch(op, [source], [v])
        if self._plan.keeps_all and i in self._plan.untouched and self._checker is None and i > 1:
            self._runs[i - 1].kept.clear()
            self._held[abar(i - 1)].pass_on()

    def _first(self, i: int, given: list[torch.Tensor], keep: bool, recipe: Recipe | None) -> list[torch.Tensor]:
        """Run stage i in the user's graph, its input's bytes being `given`; returns its outputs, detached."""
        inputs, behaviour = self._edges.pop(i - 1), self._behaviours[i - 1]
        for tensor, now in zip(inputs, given, strict=True):
            if storage_key(tensor) != storage_key(now):
                tensor.data = now  # it was moved since it was made
        for n in behaviour.copied:
            inputs[n] = inputs[n].view_as(inputs[n])  # a node of its own, which autograd gets to when it leaves the stage
            inputs[n].register_hook(compact)
        replay = None
        if i in self._plan.replayed:
            replay = ReplayState(
                self._surroundings, behaviour.changed_buffers, behaviour.changed_attributes, behaviour.modes
            )
        run = StageRun(i, self._stages[i - 1], behaviour, self._rebuild, [t.requires_grad for t in inputs], replay)
        self._runs[i] = run
        if i in self._plan.untouched and self._checker is None:
            outputs, self._rebuild = run.plain(inputs, self)
        else:
            staying = self._behaviours[i - 2].kept if i > 1 else ()
            outputs, self._rebuild = run.first(inputs, staying, keep, recipe, self)
        self._edges[i] = outputs
        return [tensor.detach() for tensor in outputs]

    # -- small things

    def stored(self, i: int) -> list[torch.Tensor]:
        """What a smaller form of stage i holds now, beyond its outputs."""
        return [slot.tensor for slot in self._runs[i].stored.values() if slot.tensor is not None]

    def _hollow(self, i: int) -> None:
        """Let the graph's own outputs of stage i give their bytes back too, where the next stage has yet to run on them."""
        if any((held := self._held.get(v)) is not None and held.on_device for v in (a(i), abar(i))):
            return
        for tensor, own in zip(self._edges.get(i, ()), self._behaviours[i - 1].own_outputs, strict=False):
            if own:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _need_link(self) -> Link:
        assert self._link is not None, "a plan that moves values needs a link"
        return self._link

    def _stage_name(self, i: int) -> str:
        return self._stages[i - 1].name if i else "input"
