"""Where the tensors of each group of parameters lie, and how they come to rest between steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...core.sequence import Value, o, w
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
)
from .updates import move_state


class ParameterPlaces:
    """The places of one parameter, its gradient and its optimizer state.

    Args:
        optimizers: those that may have its state. first: of their bytes on the host. sizes: the parameter's, the
            gradient's and the state's, in this order.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        shard: Shard | None,
        optimizers: Sequence[Optimizer],
        host: HostBytes,
        first: int,
        sizes: tuple[int, int, int],
    ) -> None:
        self.trained = parameter.requires_grad
        self.parameter = parameter
        self.weight = PlacedParameter(parameter, shard, host, first, sizes[0])
        self.gradient = PlacedGradient(parameter, shard, host, first + sizes[0], sizes[1])
        self.state_bytes = sizes[2]
        self._next, self._end = first + sum(sizes[:2]), first + sum(sizes)
        self._host, self._optimizers = host, optimizers
        self._states: dict[str, PlacedState] = {}
        self._unplanned: set[str] = set()  # states that have no place

    @property
    def together(self) -> bool:
        """Whether the device has both the parameter and its gradient, if there is one."""
        if not self.weight.look() or self.weight.device is None:
            return False
        return self.gradient.get() is None or self.gradient.on_device

    def tensors(self) -> list[PlacedTensor]:
        """Return all places."""
        return [self.weight, self.gradient, *self.states()]

    def states(self) -> list[PlacedState]:
        """Return the places of the optimizer's state of the parameter."""
        nothing: dict[str, Any] = {}
        state = next((one.state[self.parameter] for one in self._optimizers if self.parameter in one.state), nothing)
        for key, tensor in state.items():
            if key in self._states:
                self._states[key].state = state  # another one, after load_state_dict
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.numel() < 2 or not placeable(local(tensor)):
                continue
            if self._next + (room := room_of(tensor)) <= self._end:
                self._states[key] = PlacedState(state, key, self._host, self._next, room)
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

    places: by id of a parameter. members: those of each group. step: a weak reference to the running step, or None.
    plan: the latest.

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
        self.members: list[list[ParameterPlaces]] = []
        self.step: Any = None
        self.plan = NOTHING

    @property
    def planned(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not NOTHING

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
            self.places[id(p)] = ParameterPlaces(p, shard, self.optimizers, self._host, first, sizes)
        self.plan, self.members = plan, [[self.places[id(p)] for p in group.parameters] for group in plan.groups]

    def rest(self, beginning: bool) -> None:
        """Put everything where it lies between steps. beginning: a step begins, which has no room on the device for
        gradients."""
        resident = self.plan.resident
        apart = self.link.queues
        for parameter in self.plan.outside:
            move(parameter, self.link.device)
        places = [(k, one) for k, several in enumerate(self.members, start=1) for one in several]
        todo: list[tuple[PlacedTensor, bool]] = []
        for k, one in places:
            here = w(k) in resident and not (apart and beginning and one.gradient.get() is not None)
            todo += [(one.weight, here)]
            if apart or beginning:  # else the gradients of an update stay for the caller
                todo += [(one.gradient, apart and here)]
            todo += [(state, o(k) in resident) for state in one.states()]
        for tensor, here in sorted(todo, key=lambda each: each[1]):  # what goes makes room for what comes
            tensor.rest(here, same=not beginning)
        if apart and beginning and not self.shards:  # FSDP2 reads those where they are
            coming = [one.weight for k, one in places if w(k) in resident | self.plan.early]
            prefetch(weight for weight in coming if weight.on_host)
        if apart:
            self.link.drain()

    def give_back(self) -> None:
        """Put everything on the device; there is no plan then."""
        self.plan, self.members = NOTHING, []
        for places in self.places.values():
            for tensor in places.tensors():
                tensor.rest(resident=True)
                tensor.hand_over(changes=True)  # by the caller's optimizer: no later plan may take the host's copy

    def hand_over(self) -> None:
        """Give the caller everything after a backward, before the update."""
        for k, several in enumerate(self.members, start=1):
            for places in several:
                if self.link.queues and not (w(k) in self.plan.resident and places.together):
                    places.weight.release()
                    places.gradient.release()
                elif places.gradient.leaving:
                    places.gradient.release()
                for tensor in (places.weight, *places.states()):
                    tensor.hand_over(changes=places.trained)  # an update follows
                places.gradient.hand_over()
                places.gradient.join()
        if self.link.queues:
            self.link.drain()

    def tensors(self, v: Value) -> list[PlacedTensor]:
        """Return the places of the tensors of ``w k``, ``g k`` or ``o k``. FSDP2 reads a shard wherever it lies; an
        update alone needs it on the device, with its states."""
        places = self.members[v.stage - 1]
        if v.of == "g":
            return [one.gradient for one in places]
        with_states = [one for one in places if self.shards and self.link.queues and one.trained]
        if v.of == "w":
            return [one.weight for one in places if one not in with_states]
        states = [state for one in places for state in one.states()]
        return [*states, *(one.weight for one in with_states)]

    def with_autograd(self, tensor: PlacedTensor) -> bool:
        """Whether it is a gradient to which autograd may be adding on another thread."""
        return self.step is not None and isinstance(tensor, PlacedGradient) and tensor.with_autograd

    def updatable(self, k: int) -> list[ParameterPlaces]:
        """Return the places of group k, except of parameters whose gradients autograd may still change:
        ``optimizer.step()`` updates these."""
        return [one for one in self.members[k - 1] if not self.with_autograd(one.gradient)]


def settle_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of `model` to `device` for good."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # as ``nn.Module.to`` does


def all_on(model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device, whole: bool) -> None:
    """Move a model and the states of its optimizers to `device`; its parameters, too, if it is `whole`, and FSDP2 has
    not sharded it."""
    settle_buffers(model, device)
    for parameter in model.parameters() if whole else ():
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
