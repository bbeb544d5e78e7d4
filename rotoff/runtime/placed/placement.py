"""Where the groups of parameters lie while steps run and between them: what the operations on ``w``, ``g`` and ``o``
do.

Between steps, and whenever the caller can look, each tensor lies where the plan has it at rest. A step that ends early,
or an update that the caller leaves out, is no special case: the next step begins by bringing everything to rest.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.sequence import UPDATES, Op, OpKind, Value, g, o, w
from ...errors import ExecutionError
from ..links.base import Link
from .tensor import PlacedGradient, PlacedParameter, PlacedState, PlacedTensor, placeable, room_of


@dataclass(frozen=True)
class PlacedGroup:
    """The parameters of one group of the chain. state_bytes: of each, what the optimizer keeps beside it."""

    parameters: tuple[nn.Parameter, ...]
    state_bytes: tuple[int, ...]


@dataclass(frozen=True)
class PlacedPlan:
    """What a plan says of parameters.

    groups: in the chain's order. resident: the values that the device holds between steps. on_both: those of which the
    host has a valid copy, too. moved: the groups whose parameters come or go within a step.
    """

    groups: tuple[PlacedGroup, ...]
    resident: frozenset[Value]
    on_both: frozenset[Value]
    moved: frozenset[int]
    peak_bytes: int

    @property
    def host_bytes(self) -> int:
        """What the host has room for beside activations."""
        pairs = [pair for group in self.groups for pair in zip(group.parameters, group.state_bytes, strict=True)]
        return sum(2 * room_of(parameter) + state for parameter, state in pairs)


class OneStep(Protocol):
    """A step under way."""

    def abandon(self) -> None:
        """Give up all that it holds."""


class _Places:
    """Where all lies that belongs to one parameter."""

    def __init__(self, parameter: nn.Parameter, state_bytes: int, link: Link, offset: int) -> None:
        room = room_of(parameter)
        self.parameter = parameter
        self.weight = PlacedParameter(parameter, link, offset, room)
        self.gradient = PlacedGradient(parameter, link, offset + room, room)
        self._link = link
        self._states: dict[str, PlacedState] = {}
        self._next = offset + 2 * room
        self.end = self._next + state_bytes

    def states(self, state: dict[str, Any] | None) -> list[PlacedState]:
        """Those that there are; `state`: what the optimizer has of the parameter."""
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
        self._process = os.getpid()
        me = weakref.WeakMethod(self.before_update), weakref.WeakMethod(self.after_update)
        self._hooks = [
            hook
            for optimizer in self.optimizers
            for hook in (
                optimizer.register_step_pre_hook(_weakly(me[0])),
                optimizer.register_step_post_hook(_weakly(me[1])),
            )
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
        if self._step is not None and (step := self._step()) is not None:
            step.abandon()
        self._step, self._rest = None, ()
        self.show()
        self.link.begin()
        self._follow(plan, host_bytes)
        self._bring_to_rest()

    def _abandon(self) -> None:
        if self._step is not None and (step := self._step()) is not None:
            step.abandon()
        self._step = None

    def takes(self, step: OneStep) -> None:
        """`step` is the one under way."""
        self._step = weakref.ref(step)

    def _follow(self, plan: PlacedPlan, host_bytes: int) -> None:
        new = [
            (parameter, state)
            for group in plan.groups
            for parameter, state in zip(group.parameters, group.state_bytes, strict=True)
            if id(parameter) not in self._places
        ]
        end = self.base + sum(2 * room_of(parameter) + state for parameter, state in new)
        self.link.reserve(end + host_bytes)
        for parameter, state in new:
            self._places[id(parameter)] = places = _Places(parameter, state, self.link, self.base)
            self.base = places.end
        self._plan = plan

    def _bring_to_rest(self) -> None:
        assert self._plan is not None
        resident, on_both = self._plan.resident, self._plan.on_both
        for of in (g, o, w):  # what goes makes room for what comes
            values = [of(k) for k in range(1, len(self._plan.groups) + 1)]
            for v in sorted(values, key=lambda v: v in resident):
                for tensor in self._tensors(v):
                    tensor.rest(v in resident, v in on_both)

    def close(self) -> None:
        """Leave everything to the caller, on the device, and give the host's bytes back."""
        self.show()
        for hook in self._hooks:
            hook.remove()
        for places in self._places.values():
            for tensor in (places.weight, places.gradient, *places.states(self._state(places.parameter))):
                tensor.rest(resident=True)
        self._places.clear()
        self.link.close()

    # -- within a step

    def operate(self, op: Op) -> None:
        """Run a move of ``w``, ``g`` or ``o``."""
        tensors = self._tensors(op.value)
        if op.kind is OpKind.PREFETCH:
            for tensor in tensors:
                tensor.prefetch()
        elif op.kind is OpKind.WAIT:
            for tensor in tensors:
                tensor.settle()
        elif op.kind is OpKind.OFFLOAD:
            for tensor in tensors:
                tensor.offload()
        else:
            for tensor in tensors:
                tensor.release()

    def brought(self, groups: Iterable[int]) -> Iterator[tuple[nn.Parameter, PlacedTensor]]:
        """The parameters of `groups` that compute finds elsewhere than where the caller's lie, or that come and go."""
        assert self._plan is not None
        for k in groups:
            if k in self._plan.moved:
                for parameter in self._plan.groups[k - 1].parameters:
                    weight = self._places[id(parameter)].weight
                    if weight.look() and weight.device is not None:
                        yield parameter, weight

    def backward_done(self, operations: Sequence[Op]) -> None:
        """``B 1`` has run; `operations` are left, of which those before the first update run now."""
        self._step, self._rest = None, tuple(operations)
        while self._rest and self._rest[0].kind not in UPDATES:
            op, *rest = self._rest
            self._rest = tuple(rest)
            self.operate(op)
        assert self._plan is not None
        for k in range(1, len(self._plan.groups) + 1):
            for tensor in self._tensors(g(k)):
                if tensor.leaving:
                    tensor.release()
            for tensor in (*self._tensors(w(k)), *self._tensors(o(k))):
                tensor.hand_over()

    # -- updates, when the caller's ``optimizer.step()`` runs

    def before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do all that the step would, group by group, so that it finds nothing left to do."""
        if len(args) > 1 or any(value is not None for value in kwargs.values()):
            raise ExecutionError(
                "the optimizer's step was given a closure, which would run the model while its parameters are being updated; call backward"
                " before, and step() without arguments"
            )
        if self._plan is None:
            return
        self._abandon()  # of a forward whose backward has not come, which would find other parameters then
        self.show()
        with _Chunks(optimizer) as chunks:
            self._update_all(chunks)
            chunks.step(None)  # what belongs to no group
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The gradients are the caller's again."""
        self.show()

    def show(self) -> None:
        """Put gradients back that were taken from the optimizer's sight."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient

    def _update_all(self, chunks: _Chunks) -> None:
        assert self._plan is not None
        rest, self._rest = self._rest, ()
        groups = set(range(1, len(self._plan.groups) + 1))
        for op in rest:
            if op.kind is OpKind.U:
                self._update_on_device(op.stage, chunks)
            elif op.kind is OpKind.H:
                self._update_as_they_lie(op.stage, chunks)
            else:
                self.operate(op)
                continue
            groups.discard(op.stage)
        for k in sorted(groups):  # after a step without a plan
            self._update_as_they_lie(k, chunks)
        if rest:  # so that the caller never finds a copy that is on its way
            for v in self._plan.resident:
                for tensor in self._tensors(v):
                    tensor.hand_over()
                    tensor.rest(True, v in self._plan.on_both)

    def _update_on_device(self, k: int, chunks: _Chunks) -> None:
        """``U k``."""
        for v in (w(k), o(k)):
            for tensor in self._tensors(v):
                tensor.use_device()
        gradients = self._tensors(g(k))
        for gradient in gradients:
            gradient.hand_over()
        chunks.step(self._parameters(k))
        for gradient in gradients:
            if gradient.leaving:
                gradient.release()

    def _update_as_they_lie(self, k: int, chunks: _Chunks) -> None:
        """``H k``, where they lie on the host. What a first update makes goes there before the next parameter's is
        made."""
        assert self._plan is not None
        for parameter in self._parameters(k):
            chunks.step([parameter])
            for state in self._places[id(parameter)].states(self._state(parameter)):
                state.rest(o(k) in self._plan.resident)

    # -- small things

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


class _Chunks:
    """Steps of an optimizer on some of its parameters; an error in one tells which have been updated, and which may be
    in part."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._done = 0
        self._every = [group["params"] for group in optimizer.param_groups]
        self._under_way: list[nn.Parameter] = []
        self._left = {id(p): (n, p) for n, params in enumerate(self._every) for p in params}

    def __enter__(self) -> _Chunks:
        return self

    def step(self, parameters: Iterable[nn.Parameter] | None) -> None:
        """Update `parameters`, of those that have not been yet; None: all that are left."""
        keys = list(self._left) if parameters is None else [id(p) for p in parameters]
        chosen: list[list[nn.Parameter]] = [[] for _ in self._every]
        for key in keys:
            if (found := self._left.pop(key, None)) is not None and found[1].grad is not None:
                chosen[found[0]].append(found[1])
        if not any(chosen):
            return
        for group, some in zip(self._optimizer.param_groups, chosen, strict=True):
            group["params"] = some
        self._under_way = [p for some in chosen for p in some]
        own_step(self._optimizer)
        self._done += len(self._under_way)
        self._under_way = []

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        for group, every in zip(self._optimizer.param_groups, self._every, strict=True):
            group["params"] = every
        if error is not None and hasattr(error, "add_note"):  # Python 3.11
            left = self._numbers(p for _, p in self._left.values() if p.grad is not None)
            partly = self._numbers(self._under_way)
            error.add_note(
                f"rotoff: of the optimizer's parameters with gradients, this step had updated {self._done}; those numbered {partly or 'none'}"
                f" may be updated in part, and those numbered {left or 'none'} are not"
            )

    def _numbers(self, parameters: Iterable[nn.Parameter]) -> str:
        """Where `parameters` stand among all of the optimizer's, as in its state_dict."""
        numbers = {id(p): n for n, p in enumerate(p for some in self._every for p in some)}
        return ", ".join(str(n) for n in sorted(numbers[id(p)] for p in parameters))


def own_step(optimizer: Optimizer) -> None:
    """One step of the optimizer's class, past the hooks on its steps."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _weakly(method: weakref.WeakMethod[Any]) -> Any:
    def call(*args: Any) -> None:
        if (bound := method()) is not None:
            bound(*args)

    return call
