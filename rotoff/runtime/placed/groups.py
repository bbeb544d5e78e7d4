"""Where the tensors of each group of parameters lie, and how they come to rest between steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.sequence import Value, g, o, w
from ...errors import ExecutionError
from ...tensors.storage import local
from ..links.base import Link
from ..sharded import Shard
from .placed_plan import NOTHING, PlacedPlan
from .tensor import (
    HostBytes,
    PlacedGradient,
    PlacedParameter,
    PlacedState,
    PlacedTensor,
    placeable,
    prefetch,
    room_of,
    settle,
)
from .updates import move_state


class ParameterPlaces:
    """The places of one parameter, its gradient and its optimizer state.

    Args:
        first: of their bytes on the host. sizes: the parameter's, the gradient's and the state's, in this order.
    """

    def __init__(
        self, parameter: nn.Parameter, shard: Shard | None, host: HostBytes, first: int, sizes: tuple[int, int, int]
    ) -> None:
        self.trained = parameter.requires_grad
        self.parameter = parameter
        self.weight = PlacedParameter(parameter, shard, host, first, sizes[0])
        self.gradient = PlacedGradient(parameter, host, first + sizes[0], sizes[1])
        self.state_bytes = sizes[2]
        self._next, self._end = first + sum(sizes[:2]), first + sum(sizes)
        self._host = host
        self._states: dict[str, PlacedState] = {}
        self._unplanned: set[str] = set()  # states that have no place

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
            if not isinstance(tensor, torch.Tensor) or tensor.numel() < 2 or not placeable(local(tensor)):
                continue
            if self._next + (room := room_of(tensor)) <= self._end:
                self._states[key] = PlacedState(state or {}, key, self._host, self._next, room)
                self._next += room
            elif key not in self._unplanned:
                self._unplanned.add(key)
                warnings.warn(
                    f"rotoff: an optimizer keeps {key!r} for its parameters, which it did not when the step was"
                    " planned; these bytes come on top of those of the plan; call compute_sequence again",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return list(self._states.values())


class PlacedGroups:
    """The groups of a plan, each numbered from 1 on, and the places of their tensors.

    places: by id of a parameter. step: a weak reference to the running step, or None. plan: the latest.

    Args:
        link: to the host, which no one else uses.
        optimizers: those whose states are placed. shards: by id of a parameter, its shard, if FSDP2 has sharded it.
    """

    def __init__(self, link: Link, optimizers: Sequence[Optimizer], shards: Mapping[int, Shard]) -> None:
        self.link = link
        self.shards = shards
        self._host = HostBytes(link)
        self.optimizers = tuple(optimizers)
        self.places: dict[int, ParameterPlaces] = {}
        self.step: Any = None
        self.plan = NOTHING

    @property
    def planned(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not NOTHING

    @property
    def numbers(self) -> range:
        """The groups."""
        return range(1, len(self.plan.groups) + 1)

    def follow(self, plan: PlacedPlan) -> None:
        """Take `plan`, and host bytes for all that it places."""
        new: list[tuple[nn.Parameter, Shard | None, tuple[int, int, int]]] = []
        for group in plan.groups:
            for p, state in zip(group.parameters, group.state_bytes, strict=True):
                known, shard = self.places.get(id(p)), self.shards.get(id(p))
                if known is None or (p.requires_grad, state) > (known.trained, known.state_bytes):
                    room = room_of(p if shard is None else shard.data)
                    new.append((p, shard, (room, room * p.requires_grad, state)))
        firsts = self._host.take([size for *_, sizes in new for size in sizes])[::3] if new else ()
        for (p, shard, sizes), first in zip(new, firsts, strict=True):
            self.places[id(p)] = ParameterPlaces(p, shard, self._host, first, sizes)
        self.plan = plan

    def rest(self, beginning: bool) -> None:
        """Put everything where it lies between steps. beginning: a step begins, which has no room on the device for
        gradients."""
        resident, on_both = self.plan.resident, self.plan.on_both
        with suppress(ExecutionError):  # a copy that failed has lost nothing, and is made again below if need be
            settle(tensor for k in self.numbers for of in (g, o, w) for tensor in self.tensors(of(k)))
        apart = self.link.queues
        for parameter in self.plan.outside:
            move(parameter, self.link.device)
        places = [(k, self.places[id(parameter)]) for k in self.numbers for parameter in self.parameters(k)]
        todo: list[tuple[PlacedTensor, Value, bool]] = []
        for k, one in places:
            here = w(k) in resident and not (apart and beginning and one.gradient.get() is not None)
            todo += [(one.weight, w(k), here)]
            if apart or beginning:  # else the gradients of an update stay for the caller
                todo += [(one.gradient, g(k), apart and here)]
            todo += [(state, o(k), o(k) in resident) for state in self.states(one.parameter)]
        for tensor, v, here in sorted(todo, key=lambda each: each[2]):  # what goes makes room for what comes
            if here and not beginning:
                tensor.hand_over()
            tensor.rest(here, v in on_both)
        if apart and beginning:
            coming = [one.weight for k, one in places if w(k) in resident | self.plan.early]
            prefetch(weight for weight in coming if weight.on_host)
        if apart:
            self.link.drain()

    def give_back(self) -> None:
        """Put everything on the device; there is no plan then."""
        self.plan = NOTHING
        for places in self.places.values():
            for tensor in (places.weight, places.gradient, *self.states(places.parameter)):
                tensor.rest(resident=True)
                tensor.hand_over(changes=True)  # by the caller's optimizer: no later plan may take the host's copy

    def hand_over(self) -> None:
        """Give the caller everything after a backward, before the update."""
        for k in self.numbers:
            for parameter in self.parameters(k):
                places = self.places[id(parameter)]
                if self.link.queues and not (w(k) in self.plan.resident and places.together):
                    places.weight.release()
                    places.gradient.release()
                elif places.gradient.leaving:
                    places.gradient.release()
                for tensor in (places.weight, *self.states(parameter)):
                    tensor.hand_over(changes=places.trained)  # an update follows
                places.gradient.hand_over()
                places.gradient.join()
        if self.link.queues:
            self.link.drain()

    def every(self) -> list[nn.Parameter]:
        """Return the parameters of all groups."""
        return [parameter for group in self.plan.groups for parameter in group.parameters]

    def parameters(self, k: int) -> tuple[nn.Parameter, ...]:
        """Return the parameters of group k."""
        return self.plan.groups[k - 1].parameters

    def tensors(self, v: Value) -> list[PlacedTensor]:
        """Return the places of the tensors of ``w k``, ``g k`` or ``o k``."""
        parameters = self.parameters(v.stage)
        if v.of == "o":
            return [state for parameter in parameters for state in self.states(parameter)]
        places = [self.places[id(parameter)] for parameter in parameters]
        return [one.weight if v.of == "w" else one.gradient for one in places]

    def states(self, parameter: nn.Parameter) -> list[PlacedState]:
        """Return the places of the optimizer's state of a parameter."""
        state = next((one.state[parameter] for one in self.optimizers if parameter in one.state), None)
        return self.places[id(parameter)].states(state)

    def name(self, k: int) -> str:
        """Return what messages call group k."""
        return f"group {k} ({self.plan.groups[k - 1].name})"

    def with_autograd(self, tensor: PlacedTensor) -> bool:
        """Whether it is a gradient to which autograd may be adding on another thread."""
        return self.step is not None and isinstance(tensor, PlacedGradient) and tensor.with_autograd

    def updatable(self, k: int) -> list[nn.Parameter]:
        """Return the parameters of group k, except those whose gradients autograd may still change:
        ``optimizer.step()`` updates these."""
        return [p for p in self.parameters(k) if not self.with_autograd(self.places[id(p)].gradient)]

    def apart(self, parameters: Iterable[nn.Parameter]) -> dict[int, torch.Tensor]:
        """Return, by id of a parameter, the gradients that are not in ``parameter.grad``."""
        found = {id(p): self.places[id(p)].gradient.apart for p in parameters}
        return {key: gradient for key, gradient in found.items() if gradient is not None}


def settle_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of `model` to `device` for good."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # as ``nn.Module.to`` does


def all_on(model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move a whole model and the states of its optimizers to `device`."""
    settle_buffers(model, device)
    for parameter in model.parameters():
        move(parameter, device)
    for optimizer in optimizers:
        for updated, state in optimizer.state.items():
            move_state(updated, state)


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter and its gradient to `device`."""
    if parameter.device != device:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device)
        parameter.grad = None if gradient is None else gradient.to(device)
