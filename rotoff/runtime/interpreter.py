"""Runs a sequence on a model: one method per operation, and no decisions.

A stage's first forward runs in the user's own graph under saved-tensor hooks: ``F_all`` keeps what autograd saves,
``F_ck`` and ``F_none`` let it go. When the gradient reaches a stage's outputs, the interpreter runs all operations up to
that stage's ``B``, replaying forwards on detached inputs to fill the same slots again; autograd then does the backward.
What ``B`` drops goes when the next gradient arrives, for then all of the stage's backward has been issued.

Ownership: the graph (slots, hooks) owns the step and never the reverse, so that dropping the graph frees everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.variable import Variable

from ..capture.stage import Behaviour, SavedKind, StageModule, flatten, storage_key
from ..errors import ExecutionError
from ..sequence import Op, OpKind, Value, a, abar
from .check import Checker
from .link import Link
from .plan import ExecutionPlan, describe
from .replay import ReplayState, Surroundings
from .selective import OtherOperations, Recipe, Redone, redo
from .stage_run import InputRef, Packed, Resident, StageRun
from .step_times import StepTimes
from .values import Held, Slot, View

AGAIN = (
    "this step's backward has run already and rotoff keeps nothing for a second one (retain_graph=True, or two losses of"
    " one forward); add the losses up, or run the forward again"
)
GIVEN_UP = "this step was given up after an error and rotoff keeps nothing of it; run the forward again"
BESIDE = (
    "a gradient entered the graph of a stage's replay: a tensor that a stage leaves beside its output (in an attribute, a list)"
    " was made again by that replay; return it from the stage, or take it in a forward hook the first time"
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
        self._recording = link is not None and link.recording
        self._done = done
        self._checker = checker
        self._times = times
        self._surroundings = Surroundings(device)
        self._held: dict[Value, Held] = {}
        self._runs: dict[int, StageRun] = {}
        self._rebuild: dict[int, Callable[[list[torch.Tensor]], Any]] = {}
        self._edges: dict[int, list[torch.Tensor]] = {}  # outputs in the user's graph that the next stage has yet to take
        self._next = 0  # index of the next op
        self._backward = 0  # stage whose B autograd is running
        self._consumed: list[torch.UntypedStorage] = []  # its ā, where the link records
        self._closed = False
        self._failed = False

    # -- the two ways in

    def forward(self, value: Any) -> Any:
        """Run the forward phase on the chain's input; returns the last stage's output, in the user's graph."""
        tensors, self._rebuild[0] = flatten(value)
        self._edges[0] = tensors
        self._held[a(0)] = Held((a(0), "input"), [t.detach() for t in tensors])
        try:
            while self._next < self._plan.forward_end:
                self._execute(self._plan.sequence.ops[self._next])
            L = len(self._stages)
            return self._rebuild[L](self._edges.pop(L))
        except BaseException:
            self._give_up()
            raise

    def _gradient_arrived(self, i: int, _gradient: torch.Tensor) -> None:
        self._advance_to(i)

    # -- backward

    def _advance_to(self, i: int) -> None:
        """Run all operations up to ``B i`` and let autograd do that one."""
        if self._backward == i and not self._closed:
            return
        if self._closed:
            raise ExecutionError(GIVEN_UP if self._failed else AGAIN)
        if torch.is_grad_enabled():
            raise ExecutionError(TWICE)
        try:
            if not self._backward:
                Variable._execution_engine.queue_callback(self.close)
            while True:
                self._end_backward()
                while (op := self._plan.sequence.ops[self._next]).kind is not OpKind.B:
                    self._execute(op)
                self._begin_backward(op.stage)
                if self._checker is not None:
                    self._checker.begin(op)
                if self._times is not None:
                    self._times.begin(self._next - 1)
                if op.stage <= i:
                    break
            if op.stage != i:
                raise ExecutionError(f"a gradient reached stage {i} after the backward of stage {op.stage} had begun")
            if (recipe := self._runs[i].recipe) is not None:
                self._redo(i, recipe)
        except BaseException:
            self._give_up()
            raise

    def _begin_backward(self, i: int) -> None:
        self._next += 1
        self._backward = i
        if self._recording:
            self._touch(f"B {i}", [abar(i), self._input_of(i)], [])
            if i < len(self._stages):
                self._consumed = self._held[abar(i)].storages()
        # The stage's outputs have no reader left but the slots that saved them.
        if (made := self._held.pop(a(i), None)) is not None and i < len(self._stages):
            self._release(made)
        self._held[abar(i)].settle()
        for slot in self._held[abar(i)].outputs:
            slot.put(None)

    def _end_backward(self) -> None:
        i = self._backward
        if not i:
            return
        if self._times is not None:
            self._times.end()
        for v in (abar(i), a(i - 1)):
            if v in self._held and v != a(0):
                self._release(self._held.pop(v))
        if self._link is not None and self._consumed:
            staying = {s._cdata for other in self._held.values() for s in other.storages()}
            # autograd let go of them one by one
            self._link.release(f"B {i}", [s for s in self._consumed if s._cdata not in staying])
            self._consumed = []
        self._runs.pop(i, None)

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
        if self._times is not None:
            self._times.close(complete=self._backward == 1 and not self._failed)
        self._edges.clear()
        held, self._held = self._held, {}
        self._runs.clear()
        held.pop(a(0), None)
        try:
            while held:
                with suppress(Exception):
                    self._release(held.popitem()[1])
        finally:
            for value in held.values():  # an interrupt came: what is let go unawaited is safe, only later
                value.forget()
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
        self._forward(op.stage, True, None)

    def _f_ck(self, op: Op) -> None:
        self._forward(op.stage, False, None)

    def _f_none(self, op: Op) -> None:
        self._forward(op.stage, False, None)
        if op.stage > 1:
            self._drop_value(a(op.stage - 1))

    def _f_sel(self, op: Op) -> None:
        recipes = self._behaviours[op.stage - 1].forms
        if op.form > len(recipes):
            raise ExecutionError(
                f"stage {self._stage_name(op.stage)!r} has {len(recipes)} smaller forms on this machine, no form {op.form};"
                " call measure() again"
            )
        self._forward(op.stage, True, recipes[op.form - 1])

    def _offload(self, op: Op) -> None:
        place = self._plan.host[self._next]
        if self._recording:
            self._touch(str(op), [op.value], [])
        self._held[op.value].offload(self._need_link(), place.offset, place.room)
        if self._times is not None:
            self._times.copy(self._next, self._held[op.value].offloaded)

    def _free(self, op: Op) -> None:
        self._held[op.value].check_unmodified()
        self._release(self._held[op.value])
        self._hollow(op.stage)

    def _prefetch(self, op: Op) -> None:
        self._held[op.value].prefetch(self._need_link())
        if self._times is not None:
            self._times.copy(self._next, self._held[op.value].tickets[-1][1])

    def _wait(self, op: Op) -> None:
        self._held[op.value].settle()

    def _drop(self, op: Op) -> None:
        self._drop_value(op.value)

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

    # -- forwards

    def _forward(self, i: int, keep: bool, recipe: Recipe | None) -> None:
        """Run stage i; what autograd saves is kept where `keep`, in part where a `recipe` says which part."""
        if keep and i in self._runs:
            self._runs[i].stored.clear()
        if i in self._runs:
            outputs = self._replay(i, keep, recipe)
            for n, tensor in self._runs[i].kept.items() if outputs else ():
                outputs[n] = tensor  # a skip connection kept in place is there already
        else:
            outputs = self._first(i, keep, recipe)
            self._runs[i].kept = {n: outputs[n] for n in self._behaviours[i - 1].kept}
        v = abar(i) if keep else a(i)
        if keep:
            self._runs[i].recipe = recipe
        if (held := self._held.get(v)) is not None:
            held.refill(outputs)
        else:
            refs = [ref for ref in self._runs[i].slots if ref is not None] if keep else []
            if recipe is not None:
                refs = [weakref.ref(slot) for slot in self._runs[i].stored.values()]
            own = self._behaviours[i - 1].own_outputs if outputs else ()
            self._held[v] = Held((v, self._stage_name(i)), outputs, own, refs)
        if self._recording:
            self._touch(f"F {i}", [self._input_of(i)], [v])

    def _first(self, i: int, keep: bool, recipe: Recipe | None) -> list[torch.Tensor]:
        """Run stage i in the user's graph; returns its outputs, detached."""
        behaviour, inputs = self._behaviours[i - 1], self._edges.pop(i - 1)
        for tensor, now in zip(inputs, self._held[self._input_of(i)].tensors(), strict=True):
            if storage_key(tensor) != storage_key(now):
                tensor.data = now  # it was moved since it was made
        replay = ReplayState(self._surroundings, behaviour.changed_buffers) if i in self._plan.replayed else None
        run = self._runs[i] = StageRun([t.requires_grad for t in inputs], replay)
        if i in self._plan.untouched and self._checker is None:
            return self._made(i, inputs, self._stages[i - 1].run(self._rebuild[i - 1](inputs)))
        staying = self._behaviours[i - 2].kept if i > 1 else ()
        places = {storage_key(t): n for n, t in enumerate(inputs) if n not in staying}
        slots, shapes, kinds = run.slots, run.shapes, behaviour.saved
        whole = [View.of(t) for t in inputs]
        own, reference, whole_kept = SavedKind.OWN, weakref.ref, keep and recipe is None

        # Autograd calls these two once for each tensor saved, so the usual case comes first and calls little.
        def pack(tensor: torch.Tensor) -> Packed:
            n = len(slots)
            place = places.get(tensor.untyped_storage()._cdata)
            if n >= len(kinds) or (place is not None) != (kinds[n] is SavedKind.INPUT):
                raise self._changed(i)
            if kinds[n] is own:
                if replay is not None:
                    shapes.append((tensor.shape, tensor.dtype))
                # A stage's results come with their graph, which must neither keep itself nor the stage's input alive.
                tensor = tensor.detach() if tensor.requires_grad else tensor
                slot = Slot(tensor if whole_kept else None)
                if recipe is not None:
                    self._stored(i, recipe, n, tensor, slot)
                slots.append(reference(slot))
                return slot
            slots.append(None)
            shapes.append(None)
            if place is None:
                if kinds[n] is SavedKind.KEPT:
                    tensor = tensor.detach()
                    run.kept_saved[n] = tensor
                return Resident(tensor, tensor._version)
            view = View.of(tensor)
            return InputRef(place, None if view == whole[place] else view)

        def unpack(packed: Packed) -> torch.Tensor:
            if self._backward == i and type(packed) is Slot and not self._closed:
                tensor = packed.tensor
                if tensor is not None and tensor._version == packed.version:
                    return tensor
            return self._unpack(i, packed)

        with saved_tensors_hooks(pack, unpack):
            result = self._stages[i - 1].run(self._rebuild[i - 1](inputs))
        if len(slots) != len(kinds):
            raise self._changed(i)
        return self._made(i, inputs, result)

    def _made(self, i: int, inputs: list[torch.Tensor], result: Any) -> list[torch.Tensor]:
        """Take the output of stage i's first run in; returns its tensors, detached."""
        outputs, self._rebuild[i] = flatten(result)
        if len(outputs) != len(self._behaviours[i - 1].own_outputs):
            raise self._changed(i)
        for n, own in enumerate(self._behaviours[i - 1].own_outputs):
            if any(outputs[n] is given for given in inputs):
                if not own and n not in self._behaviours[i - 1].kept:
                    continue  # the batch's, say: its gradient is whole much later
                outputs[n] = outputs[n].view_as(outputs[n])  # a skip connection: its bytes may come and go on their own
            if outputs[n].grad_fn is not None:
                outputs[n].register_hook(partial(self._gradient_arrived, i))
        self._edges[i] = outputs
        self._runs[i].made = [(tensor.shape, tensor.dtype) for tensor in outputs]
        return [tensor.detach() for tensor in outputs]

    def _replay(self, i: int, keep: bool, recipe: Recipe | None) -> list[torch.Tensor]:
        """Run stage i again on detached inputs, filling the slots of its first run where `keep`; returns its outputs, none where
        nobody takes them: then it ends at the last tensor that autograd saved."""
        run = self._runs[i]
        enough = self._behaviours[i - 1].enough if self._next in self._plan.closing else 0
        held = self._held[self._input_of(i)]
        inputs = [t.detach().requires_grad_(needs) for t, needs in zip(held.tensors(), run.requires_grad, strict=True)]
        places = {storage_key(t) for t in inputs}
        slots, shapes, count = run.slots, run.shapes, 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            n, count = count, count + 1
            if n >= len(slots):
                raise self._changed(i)
            if (ref := slots[n]) is None:
                return
            if shapes[n] != (tensor.shape, tensor.dtype) or storage_key(tensor) in places:
                raise self._changed(i)
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if recipe is not None:
                self._stored(i, recipe, n, tensor, ref())
            elif keep and (slot := ref()) is not None:
                slot.tensor, slot.version = tensor, tensor._version
            if count == enough:
                raise Redone

        assert run.replay is not None
        try:
            with run.replay, saved_tensors_hooks(pack, self._never):
                outputs, _ = flatten(self._stages[i - 1].run(self._rebuild[i - 1](inputs)))
        except Redone:
            return []
        if count != len(run.slots) or [(tensor.shape, tensor.dtype) for tensor in outputs] != run.made:
            raise self._changed(i)
        return [tensor.detach() for tensor in outputs]

    def _stored(self, i: int, recipe: Recipe, n: int, tensor: torch.Tensor, slot: Slot | None) -> None:
        """Fill and hold slot `n` of stage i where form `recipe` stores it; `slot` is it, where the graph still has it."""
        if n in recipe.kept:
            if View.of(tensor) != recipe.views[n]:
                raise self._changed(i)
            slot = slot or Slot(None)
            slot.put(tensor)
            self._runs[i].stored[n] = slot

    def _redo(self, i: int, recipe: Recipe) -> None:
        """Make again what form `recipe` of stage i did not store; its slots are full then, as after ``F_all``."""
        run, held = self._runs[i], self._held[self._input_of(i)]
        self._held[abar(i)].check_unmodified()
        inputs = [t.detach().requires_grad_(needs) for t, needs in zip(held.tensors(), run.requires_grad, strict=True)]
        places = {storage_key(t) for t in inputs}
        stored = {n: slot.tensor for n, slot in run.stored.items() if slot.tensor is not None} | run.kept_saved
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            n, count = count, count + 1
            if (ref := run.slots[n]) is None:
                return
            if run.shapes[n] != (tensor.shape, tensor.dtype) or storage_key(tensor) in places:
                raise self._changed(i)
            if n not in stored and (slot := ref()) is not None:
                slot.put(tensor.detach() if tensor.requires_grad else tensor)

        assert run.replay is not None
        try:
            redo(recipe, lambda: self._stages[i - 1].run(self._rebuild[i - 1](inputs)), stored, pack, run.replay)
        except OtherOperations:
            raise self._changed(i) from None
        run.stored.clear()

    def _unpack(self, i: int, packed: Packed) -> torch.Tensor:
        if self._backward != i or self._closed:
            if torch._C._current_graph_task_id() == -1:
                raise ExecutionError(
                    f"what stage {self._stage_name(i)!r} saved can only be read by its backward under rotoff"
                )
            self._advance_to(i)  # no hook fired: the gradient entered within the stage
        slot = self._held[self._input_of(i)].outputs[packed.place] if isinstance(packed, InputRef) else packed
        tensor = slot.tensor
        assert tensor is not None, f"the machine made no value for what stage {i} saved"
        if tensor._version != slot.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
                f" that stage {self._stage_name(i)!r} saved; clone it before changing it"
            )
        if isinstance(packed, InputRef) and packed.view is not None:
            return packed.view.into(tensor)
        return tensor

    @staticmethod
    def _never(_: None) -> torch.Tensor:
        raise ExecutionError(BESIDE)

    # -- small things

    def stored(self, i: int) -> list[torch.Tensor]:
        """What a smaller form of stage i holds now, beyond its outputs."""
        return [slot.tensor for slot in self._runs[i].stored.values() if slot.tensor is not None]

    def _input_of(self, i: int) -> Value:
        plain = self._held.get(a(i - 1))
        return a(i - 1) if plain is not None and plain.usable else abar(i - 1)

    def _drop_value(self, v: Value) -> None:
        held = self._held[v]
        self._release(held)
        if held.offloaded is None:
            del self._held[v]
        self._hollow(v.stage)

    def _hollow(self, i: int) -> None:
        """Let the graph's own outputs of stage i give their bytes back too, where the next stage has yet to run on them."""
        if any((held := self._held.get(v)) is not None and held.on_device for v in (a(i), abar(i))):
            return
        for tensor, own in zip(self._edges.get(i, ()), self._behaviours[i - 1].own_outputs, strict=False):
            if own:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _release(self, held: Held) -> None:
        leaving = held.storages() if self._recording else []
        held.settle()
        if self._link is not None and leaving:
            others = [s for other in self._held.values() if other is not held for s in other.storages()]
            staying = {s._cdata for s in (*self._consumed, *others)}  # a skip connection's bytes stand in several values
            self._link.release(held.name, [s for s in leaving if s._cdata not in staying])
        held.release()

    def _touch(self, what: str, reads: Sequence[Value], writes: Sequence[Value]) -> None:
        if self._link is not None:
            storages = [[s for v in values for s in self._held[v].storages()] for values in (reads, writes)]
            self._link.access(what, *storages)

    def _need_link(self) -> Link:
        assert self._link is not None, "a plan that moves values needs a link"
        return self._link

    def _stage_name(self, i: int) -> str:
        return self._stages[i - 1].name if i else "input"

    def _changed(self, i: int) -> ExecutionError:
        return ExecutionError(
            f"stage {self._stage_name(i)!r} saved other tensors for backward than when it was measured (its forward depends"
            " on data or state); call measure() again, or merge it with its neighbours into one stage"
        )
