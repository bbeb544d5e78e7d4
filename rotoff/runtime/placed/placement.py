"""Moves the groups of parameters within and between steps: runs the operations on ``w``, ``g`` and ``o``.

Between steps, each tensor lies where the plan has it at rest. A step that ends early, or an update that the caller
leaves out, needs no special case: the next step begins by bringing everything to rest.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.sequence import UPDATES, Op, OpKind, Value, g, o, w
from ...errors import ExecutionError
from ...tensors.tree import flatten
from ..links.base import Link
from .all_at_once import Guard
from .lending import Lender, Streamed, move
from .placed_plan import PlacedPlan
from .tensor import PlacedGradient, PlacedParameter, PlacedState, PlacedTensor, placeable, room_of
from .updates import Chunks, HostLane, is_nested, parameters_of, read_by


class OneStep(Protocol):
    """A running step."""

    def abandon(self) -> None:
        """Abort it, and release all that it holds."""


class _Places:
    """The places of one parameter, its gradient and its optimizer state."""

    def __init__(self, parameter: nn.Parameter, state_bytes: int, link: Link, offset: int) -> None:
        room = room_of(parameter)
        self.trained = parameter.requires_grad
        self.parameter = parameter
        self.weight = PlacedParameter(parameter, link, offset, room)
        self.gradient = PlacedGradient(parameter, link, offset + room, room if self.trained else 0)
        self._link = link
        self._states: dict[str, PlacedState] = {}
        self._next = offset + room * (1 + self.trained)
        self.end = self._next + state_bytes

    @property
    def together(self) -> bool:
        """Whether the device has both the parameter and its gradient, if there is one."""
        if not self.weight.look() or self.weight.device is None:
            return False
        return self.gradient.get() is None or self.gradient.on_device

    def states(self, state: dict[str, Any] | None) -> list[PlacedState]:
        """Return the places of its state tensors; `state`: the optimizer's state of the parameter."""
        for key, tensor in (state or {}).items():
            if key in self._states:
                self._states[key].state = state or {}  # another one, after load_state_dict
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.numel() < 2 or not placeable(tensor):
                continue
            if (end := self._next + room_of(tensor)) <= self.end:
                self._states[key] = PlacedState(state or {}, key, self._link, self._next, room_of(tensor))
                self._next = end
        return list(self._states.values())


class Placement:
    """The parameters of one model and the states that `optimizers` keep of them.

    Args:
        link: to the host, of which this takes bytes from 0 on; `base` is where others may begin.
    """

    def __init__(self, link: Link, optimizers: Sequence[Optimizer]) -> None:
        self.link = link
        self.base = 0
        self.optimizers = tuple(optimizers)
        self._places: dict[int, _Places] = {}
        self._plan: PlacedPlan | None = None
        self._rest: tuple[Op, ...] = ()  # operations after ``B 1`` that have not run yet
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._step: Any = None
        self._host = HostLane(link.queues)
        self._chunks: list[Chunks] = []  # of the running update
        self._updated: list[int] = []  # groups whose update has begun since the last step began
        self._gone: set[int] = set()  # by id, the parameters updated within the last backward
        self._in_backward = False  # whether the running update is within a backward
        # optimizers whose parameters a backward has updated, without their own step since, and what it read of them
        self._await_step: dict[Optimizer, list[Any]] = {}
        self._unguard: Callable[[], object] = tuple  # closes the `Guard`
        self._process = os.getpid()
        me = weakref.WeakMethod(self.before_update), weakref.WeakMethod(self.after_update)
        self._hooks = [
            (one, one.register_step_pre_hook(_weakly(me[0])), one.register_step_post_hook(_weakly(me[1])))
            for one in self.optimizers
        ]

    # -- between steps

    def begin(self, plan: PlacedPlan, host_bytes: int = 0) -> None:
        """Bring everything to rest as `plan` says. host_bytes: of activations, from `base` on.

        Raises:
            ExecutionError: in a forked process, which does not share the host's bytes.
        """
        if self._process != os.getpid():
            raise ExecutionError(
                "parameters were placed by the process that this one was forked from; train there, or fork before"
            )
        self._abandon()
        self._rest = ()
        for places in self._places.values():
            places.gradient.apart = None  # of a backward that failed
        self.show()
        self.link.begin()
        self._follow(plan, host_bytes)
        self._bring_to_rest(beginning=True)

    def _abandon(self) -> None:
        if self._step is not None and (step := self._step()) is not None:
            step.abandon()
        self._step = None
        self.backward_failed(None)

    def takes(self, step: OneStep) -> None:
        """Note that `step` is running.

        Raises:
            ExecutionError: if updates come during the backward, and there are gradients before it.
        """
        assert self._plan is not None
        for gradient in (self._places[id(p)].gradient for p in self._every()) if self._plan.during else ():
            if (earlier := gradient.get()) is not None:
                if earlier.any():
                    raise _accumulates("parameters have gradients before the backward")
                gradient.forget()  # zeros, by ``zero_grad(set_to_none=False)`` after a step without a plan
        self._step = weakref.ref(step)
        for optimizer, before, after in self._hooks:  # the caller's find the gradients and the parameters of their time
            ordered: Any = optimizer  # its hooks are in ordered dictionaries
            ordered._optimizer_step_pre_hooks.move_to_end(before.id)
            ordered._optimizer_step_post_hooks.move_to_end(after.id, last=False)

    def _follow(self, plan: PlacedPlan, host_bytes: int) -> None:
        new = [
            (parameter, state)
            for group in plan.groups
            for parameter, state in zip(group.parameters, group.state_bytes, strict=True)
            if (known := self._places.get(id(parameter))) is None or parameter.requires_grad > known.trained
        ]
        if new and self.base:  # so that each lies in bytes that were secured at once
            self.base = max(self.base, self.link.capacity)
        end = self.base + sum(room_of(p) * (1 + p.requires_grad) + state for p, state in new)
        self.link.reserve(end + host_bytes)
        for parameter, state in new:
            self._places[id(parameter)] = places = _Places(parameter, state, self.link, self.base)
            self.base = places.end
        if plan is not self._plan:
            self._unguard()
            if plan.during:
                self._unguard = weakref.finalize(self, Guard(p for one in plan.groups for p in one.parameters).close)
        self._plan = plan

    def _bring_to_rest(self, beginning: bool) -> None:
        """Put everything where it lies between steps. beginning: a step begins, which has no room on the device for
        gradients."""
        assert self._plan is not None
        resident, on_both = self._plan.resident, self._plan.on_both
        numbers = range(1, len(self._plan.groups) + 1)
        if not self.link.queues:
            for of in (g, o, w):  # what goes makes room for what comes
                values = [of(k) for k in numbers]
                for v in sorted(values, key=lambda v: v in resident):
                    for tensor in self._tensors(v):
                        tensor.rest(v in resident, v in on_both)
            return
        for parameter in self._plan.outside:
            move(parameter, self.link.device)
        for k in numbers:
            for state in self._tensors(o(k)):
                state.rest(o(k) in resident, o(k) in on_both)
            for parameter in self._parameters(k):
                places = self._places[id(parameter)]
                here = w(k) in resident and not (beginning and places.gradient.get() is not None)
                places.weight.rest(here, w(k) in on_both)
                places.gradient.rest(here)
                if beginning and not here and w(k) in resident | self._plan.early:
                    places.weight.prefetch()
        self.link.drain()

    def close(self, resident: bool = True) -> None:
        """Return everything to the caller, on the device if `resident`, else where it lies; and free the host's
        bytes."""
        self._abandon()
        self._host.close()
        self._unguard()
        self.show()
        for _, *hooks in self._hooks:
            for hook in hooks:
                hook.remove()
        for places in self._places.values() if resident else ():
            for tensor in (places.weight, places.gradient, *places.states(self._state(places.parameter))):
                tensor.rest(resident=True)
        self._places.clear()
        self.link.close()

    # -- within a step

    def forward_begins(self) -> None:
        """Before a training forward, with a plan or without one.

        Raises:
            ExecutionError: if the forward comes between a backward that has updated parameters and its step.
        """
        self.refuse_before_step()
        self._updated, self._gone = [], set()

    def watch(self, result: Any) -> None:
        """Have the backward of a step without a plan, whose forward has returned `result`, begin as a planned one's:
        autograd cannot add to marks."""
        if any(places.gradient.marked for places in self._places.values()):
            for tensor in flatten(result)[0]:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.backward_begins())

    def backward_begins(self) -> None:
        """Check that the caller has cleared the gradients that an earlier backward used up.

        Raises:
            ExecutionError: if not, since plain PyTorch would add to them.
        """
        if any(places.gradient.stale for places in self._places.values()):
            raise _accumulates("the gradients of the step before are gone, but have not been cleared")
        for places in self._places.values():
            places.gradient.unmark()

    def operate(self, op: Op) -> None:
        """Run an update, or a move of ``w``, ``g`` or ``o``."""
        if op.kind in UPDATES:
            self._update(op)
            return
        assert self._plan is not None
        if op.of != "g":
            self._host.join(op.stage)
        if op.kind is OpKind.PREFETCH and op.value in self._plan.early and op.stage in self._updated:
            return  # it comes when the next step begins, since the caller may change it before
        updating = self.link.queues and op.of == "g" and op.stage in self._updated
        for tensor in self._tensors(op.value):
            if self._is_with_autograd(tensor):
                continue
            if updating:  # the host's thread updates this group, and only it may read the caller's tensors
                tensor.let_go()
            elif op.kind is OpKind.PREFETCH:
                tensor.prefetch()
            elif op.kind is OpKind.WAIT:
                tensor.settle()
            elif op.kind is OpKind.OFFLOAD:
                tensor.offload()
            else:
                tensor.release()

    def brought(self, groups: Iterable[int]) -> Iterator[tuple[nn.Parameter, PlacedTensor, PlacedGradient | None]]:
        """Yield the parameters of `groups` that compute does not read from the caller's tensor, or that are moved
        within the step; each with its place and, unless autograd accumulates its gradient, the gradient's place."""
        assert self._plan is not None
        for k in groups:
            for parameter in self._parameters(k):
                places = self._places[id(parameter)]
                elsewhere = self.link.queues and places.weight.on_host
                if (elsewhere or k in self._plan.moved) and places.weight.look() and places.weight.device is not None:
                    places.weight.settle()
                    yield parameter, places.weight, places.gradient if elsewhere else None

    def lender(self) -> Lender | None:
        """Return the lender of parameters on the host, for calls outside of the plan; None if there are none."""
        return Lender(self._every(), self.link.device) or None

    def streamed(self) -> Streamed | None:
        """Return the context for a forward without a plan; None if it needs none."""
        if self._plan is None:
            return None
        self.refuse_before_step()
        return Streamed(self._every(), self.link.device, self._plan.room) or None

    def _every(self) -> list[nn.Parameter]:
        assert self._plan is not None
        return [parameter for group in self._plan.groups for parameter in group.parameters]

    def backward_done(self, operations: Sequence[Op]) -> None:
        """End the backward. Of the `operations` left, run those that come before the caller's ``optimizer.step()``."""
        assert self._plan is not None
        self._step, self._rest = None, tuple(operations)
        try:
            while self._rest and (self._plan.during or self._rest[0].kind not in UPDATES):
                op, *rest = self._rest
                self._rest = tuple(rest)
                self.operate(op)
            if self._plan.during:
                self._end_update()
        except BaseException as error:
            self.backward_failed(error)
            raise
        if self._plan.during:
            owners = (one for one in self.optimizers if not self._gone.isdisjoint(map(id, parameters_of(one))))
            self._await_step = {one: read_by(one) for one in owners}
            for key in self._gone & self._places.keys():
                self._places[key].gradient.mark()
            return
        for k in range(1, len(self._plan.groups) + 1):
            for parameter in self._parameters(k):
                places = self._places[id(parameter)]
                if self.link.queues and not (w(k) in self._plan.resident and places.together):
                    places.weight.release()
                    places.gradient.release()
                elif places.gradient.leaving:
                    places.gradient.release()
                for tensor in (places.weight, *places.states(self._state(parameter))):
                    tensor.hand_over()
                places.gradient.hand_over()
                places.gradient.join()
        if self.link.queues:
            self.link.drain()

    # -- updates: during the backward, or when the caller's ``optimizer.step()`` runs

    def before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before ``optimizer.step()``: do its work group by group, so that it finds nothing left to do. A closure
        is called first, as the step would; the step gets one that returns the same loss."""
        if is_nested(optimizer):
            return None
        closure = next((given for given in (*args[1:], *kwargs.values()) if callable(given)), None)
        if closure is None:
            self._update_all(optimizer, args[1:], kwargs)
            return None
        with torch.enable_grad():
            loss = closure()

        def with_closure(instead: Any) -> tuple[list[Any], dict[str, Any]]:
            own = {name: instead if value is closure else value for name, value in kwargs.items()}
            return [instead if value is closure else value for value in args], own

        given, named = with_closure(None)
        self._update_all(optimizer, given[1:], named)
        given, named = with_closure(lambda: loss)
        return tuple(given), named

    def _update_all(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if self._plan is None:
            return
        self._abandon()  # of a forward whose backward has not come, which would find other parameters then
        self.show()
        self._hide_marks(optimizer, any(given is not None for given in (*args, *kwargs.values())))
        self._refuse_late_gradients()
        rest, self._rest = self._rest, ()
        self._chunks = [Chunks(optimizer, args, kwargs)]
        self._updated = self._updated if self._plan.during else []
        try:
            for op in rest:
                self.operate(op)
            for k in range(1, len(self._plan.groups) + 1):  # after a step without a plan
                if k not in self._updated:
                    self._update(Op(OpKind.H, k))
            self._host.join()
            self._chunks[0].step()  # what belongs to no group
            self._end_update(bool(rest))
        except BaseException as error:
            self._give_up(error)
            raise
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook after ``optimizer.step()``: give the gradients back to the caller."""
        if not is_nested(optimizer):
            self.show()

    def _hide_marks(self, optimizer: Optimizer, told: bool) -> None:
        """Hide from the optimizer that the backward has used up gradients; it has no step left to do for them. told:
        whether the caller gives the step arguments."""
        placed = ((p, self._places.get(id(p))) for p in parameters_of(optimizer))
        marked = [p for p, places in placed if places is not None and places.gradient.marked]
        if marked and optimizer not in self._await_step:
            raise ExecutionError(
                'this is a second optimizer.step() after one backward, whose gradients are gone with updates="during";'
                ' plan with updates="after"'
            )
        changed = marked and self._await_step[optimizer] != read_by(optimizer)
        if marked and (told or changed):
            finds = "gets arguments" if told else "finds other parameters or settings than the backward did"
            raise ExecutionError(
                f'optimizer.step() {finds}, and updates="during" has updated the parameters in the backward; plan with'
                ' updates="after"' + ("" if told else ", or change them before the backward")
            )
        self._await_step.pop(optimizer, None)
        self._hidden += [(p, p.grad) for p in marked if p.grad is not None]
        for parameter in marked:
            parameter.grad = None

    def show(self) -> None:
        """Put the gradients back that were hidden from the optimizer."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient

    def refuse_before_step(self, what: str = "this forward") -> None:
        """Raise if a backward has updated parameters that plain PyTorch would update in an ``optimizer.step()`` that
        has not come. what: the caller does now."""
        if self._await_step:
            raise _accumulates(f"{what} comes between a backward and optimizer.step()")

    def _refuse_late_gradients(self) -> None:
        """Raise if a gradient came after its parameter had been updated within the backward."""
        assert self._plan is not None
        late = [
            k
            for k in self._updated
            for p in self._parameters(k)
            if p.grad is not None and id(p) in self._gone and not self._places[id(p)].gradient.marked
        ]
        if late:
            raise ExecutionError(
                f"parameters of {self._name(late[0])} got gradients from outside of the model after the backward had"
                ' updated them; plan with updates="after"'
            )

    def _update(self, op: Op) -> None:
        """Run ``U k``, on the device, or ``H k``, on the host."""
        if not self._chunks:
            self._in_backward = True
            self._chunks = [Chunks(optimizer) for optimizer in self.optimizers]
        self._updated.append(op.stage)
        if op.kind is OpKind.H:
            self._update_on_host(op.stage)
        else:
            self._update_on_device(op.stage)

    def _update_on_device(self, k: int) -> None:
        assert self._plan is not None
        apart = self.link.queues
        for v in (w(k), o(k)):
            for tensor in self._tensors(v):
                if apart:
                    tensor.prefetch()
                tensor.use_device()
        parameters = self._updatable(k)
        gradients = [self._places[id(p)].gradient for p in parameters]
        for gradient in gradients:
            if apart:
                gradient.prefetch()
            gradient.hand_over()
        for chunks in self._chunks:
            chunks.step(parameters, self._apart(parameters))
        for gradient in gradients:
            if self._in_backward:
                gradient.let_go()
                gradient.forget()
            elif gradient.leaving and not (apart and w(k) in self._plan.resident):
                gradient.release()

    def _update_on_host(self, k: int) -> None:
        """Update group k on the host; without a device of its own, where its tensors lie: then the state that a first
        update makes goes to the host before that of the next parameter is made."""
        assert self._plan is not None
        apart, resident, within = self.link.queues, o(k) in self._plan.resident, self._in_backward
        tensors = [tensor for v in (w(k), g(k), o(k)) for tensor in self._tensors(v)] if apart else []
        for tensor in tensors:
            if not self._is_with_autograd(tensor):
                tensor.show_host()
        chunks, parameters = self._chunks, self._updatable(k)

        def update() -> None:
            for tensor in tensors:
                tensor.arrive()
            for parameter in parameters:
                for one in chunks:
                    one.step([parameter], self._apart([parameter]))
                if within:
                    self._places[id(parameter)].gradient.forget()
                if not apart:
                    for state in self._places[id(parameter)].states(self._state(parameter)):
                        state.rest(resident)

        self._host.run(k, update)

    def _end_update(self, planned: bool = True) -> None:
        """End an update of all groups: put everything to rest for the caller, with no copy running."""
        assert self._plan is not None
        self._host.join()
        if self.link.queues:
            self._bring_to_rest(beginning=False)
        else:
            for v in self._plan.resident if planned else ():
                for tensor in self._tensors(v):
                    tensor.hand_over()
                    tensor.rest(True, v in self._plan.on_both)
        if self._in_backward:
            self._gone = {key for one in self._chunks for key in one.updated}
        self._chunks, self._in_backward = [], False

    def _give_up(self, error: BaseException | None) -> list[Chunks]:
        """Abort an update; add to `error` what has been updated."""
        chunks, self._chunks, self._in_backward = self._chunks, [], False
        with suppress(BaseException):
            self._host.join()
        if error is not None:
            for one in chunks:
                one.explain(error)
        return chunks

    def backward_failed(self, error: BaseException | None) -> None:
        """Abort the updates of a backward that ended early; add to `error`, or else warn, what it has updated."""
        if not self._in_backward:
            return
        updated = {key for one in self._give_up(error) for key in one.updated}
        names: list[list[str]] = [[], [], []]
        assert self._plan is not None
        for k, group in enumerate(self._plan.groups, start=1):
            if any(p.requires_grad for p in group.parameters):
                parts = {id(p) in updated for p in group.parameters}
                names[0 if parts == {True} else 1 if k in self._updated else 2].append(self._name(k))
        whole, partly, not_yet = (", ".join(some) or "none" for some in names)
        said = (
            f"rotoff: a backward that updates parameters ended early; it has updated {whole}, perhaps in part {partly},"
            f" and not {not_yet}"
        )
        if error is None:
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        elif hasattr(error, "add_note"):  # Python 3.11
            error.add_note(said)

    # -- small things

    def _is_with_autograd(self, tensor: PlacedTensor) -> bool:
        """Whether it is a gradient to which autograd may be adding on another thread."""
        return self._step is not None and isinstance(tensor, PlacedGradient) and tensor.with_autograd

    def _updatable(self, k: int) -> list[nn.Parameter]:
        """Return the parameters of group k, except those whose gradients autograd may still change:
        ``optimizer.step()`` updates these."""
        return [p for p in self._parameters(k) if not self._is_with_autograd(self._places[id(p)].gradient)]

    def _apart(self, parameters: Iterable[nn.Parameter]) -> dict[int, torch.Tensor]:
        """Return, by id of a parameter, the gradients that are not in ``parameter.grad``."""
        found = {id(p): self._places[id(p)].gradient.apart for p in parameters}
        return {key: gradient for key, gradient in found.items() if gradient is not None}

    def _name(self, k: int) -> str:
        assert self._plan is not None
        return f"group {k} ({self._plan.groups[k - 1].name})"

    def _parameters(self, k: int) -> tuple[nn.Parameter, ...]:
        assert self._plan is not None
        return self._plan.groups[k - 1].parameters

    def _tensors(self, v: Value) -> list[PlacedTensor]:
        found: list[PlacedTensor] = []
        for parameter in self._parameters(v.stage):
            places = self._places[id(parameter)]
            if v.of == "w":
                found.append(places.weight)
            elif v.of == "g":
                found.append(places.gradient)
            else:
                found += places.states(self._state(parameter))
        return found

    def _state(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        return next((one.state[parameter] for one in self.optimizers if parameter in one.state), None)


def _accumulates(what: str) -> ExecutionError:
    return ExecutionError(
        f'{what}, and updates="during" has no gradients to add to; call optimizer.step() and'
        ' zero_grad(set_to_none=True) before, or plan with updates="after"'
    )


def _weakly(method: weakref.WeakMethod[Any]) -> Any:
    def call(*args: Any) -> Any:
        return None if (bound := method()) is None else bound(*args)

    return call
