"""The backward phase of a step, which autograd drives, and its end.

When the gradient reaches a stage's outputs, the step runs all operations up to that stage's ``B``. Replays run forwards
on detached inputs and fill the slots of the first run again; autograd then runs the backward. The values that ``B``
drops are released when the next gradient arrives, because all of the stage's backward has been issued by then.

Ownership: the graph (slots, hooks) owns the step and never the reverse, so dropping the graph frees everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.variable import Variable

from ..core.sequence import Op, OpKind, a, abar
from ..errors import ExecutionError
from ..tensors.saved_tensors import saved_hooks
from .interpreter import Interpreter
from .placed.lending import Lender
from .values import Held, HeldValues, Slot, as_made

AGAIN = (
    "this step's backward has run already and released its saved tensors; a second one needs retain_graph=True in the"
    " first, and a plan that does not move parameters"
)
GIVEN_UP = "this step was aborted after an error and its saved tensors were released; run the forward again"
SUPERSEDED = (
    "this step was aborted, because another forward began or the optimizer updated the parameters before its backward"
    " ran; call backward right after each forward, or call the model once, on both batches concatenated"
)
TWICE = (
    "rotoff does not differentiate twice (create_graph=True): it recomputes outside of the graph; use the plain model"
)


class BackwardPhase(Interpreter):
    """Runs the operations after the forward phase as gradients reach the stages."""

    _backward = 0  # stage whose B autograd is running
    _task: int | None = None  # autograd's number of the last backward that has used this graph
    _again = False  # whether this backward leaves a graph that another one may use
    _failed = False
    _why = GIVEN_UP
    _lender: Lender | None = None

    # -- a backward

    def input_slots(self, i: int) -> list[Slot]:
        return self._held[self._held.input_of(i)].outputs

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
        return saved_hooks(pack, unpack)

    def gradient_arrived(self, i: int, _gradient: torch.Tensor) -> None:
        """Tensor hook: autograd has the gradient of an output of stage i."""
        self.advance_to(i)

    def advance_to(self, i: int) -> None:
        """Run all operations before ``B i``, which autograd then runs."""
        task = torch._C._current_graph_task_id()
        if self._backward == i and self._task == task and not self._closed:
            return
        if self._closed or (self._placement is not None and self._task not in (None, task)):
            raise ExecutionError(self._why if self._failed else AGAIN)
        if torch.is_grad_enabled():
            raise ExecutionError(TWICE)
        if self._task != task:
            self._begin_pass(task)
        if i > self._last:
            raise ExecutionError(AGAIN)
        try:
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
                self._runs[i].redo(as_made(self.input_slots(i), self._stage_name(i)))
            self._algorithms.begin_backward(i)
        except BaseException as error:
            if self._placement is not None:
                self._placement.updates.backward_failed(error)
            self._give_up()
            raise

    def _begin_pass(self, task: int) -> None:
        """Autograd has begun backward `task`. If an earlier one has used the graph, all values are made again."""
        if self._placement is not None:
            self._placement.check_process()
            self._placement.gradients.backward_begins()
        if self._task is not None:
            self._rest()  # an error of the caller's may have stopped the earlier one
            self._link = None if self._take is None else self._take()
            self._held = HeldValues(self._link)
            self._held[a(0)] = Held((a(0), "input"), [])
        Variable._execution_engine.queue_callback(self._end_pass)
        self._task = task
        self._again = self._placement is None and torch._C._autograd._get_current_graph_task_keep_graph()

    def _end_pass(self) -> None:
        """Autograd has ended a backward. Where another one may follow, only the values are released."""
        if self._placement is not None or not (self._again or any(run.has_graph() for run in self._runs.values())):
            self.close(ended=True)
        elif not self._closed:
            self._rest()

    def _begin_backward(self, op: Op) -> None:
        i, index = op.stage, self._next
        self._next += 1
        self._backward = i
        self._runs[i].task, self._runs[i].frees = self._task, self._again
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

    def stored(self, i: int) -> list[torch.Tensor]:
        """Return the tensors that a smaller form of stage i stores now, beyond its outputs."""
        return [slot.tensor for slot in self._runs[i].stored.values() if slot.tensor is not None]

    # -- its end

    @property
    def closed(self) -> bool:
        """Whether the backward has run or the step was aborted."""
        return self._closed or (self._task is not None and not self._backward)

    def abandon(self) -> None:
        """Abort this step, because another step or an update of the parameters begins."""
        if not self._closed:
            self._why = SUPERSEDED
            self._give_up()

    def _give_up(self) -> None:
        self._failed = True
        self.close()

    def close(self, ended: bool = False) -> None:
        """Release all that the step holds; may be called again. ended: because a backward has ended.

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
            if self._placement is not None and ended and not self._failed:  # perhaps before stage 1, which it skipped
                self._placement.backward_done(self._plan.sequence.ops[self._next :] if complete else ())
            self._placement = None

    def _rest(self) -> None:
        """Release the values, but not the graph."""
        self._release(complete=self._backward == 1)
        for run in self._runs.values():
            run.pause()
        self._next, self._backward, self._last = 0, 0, max(self._runs)

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
