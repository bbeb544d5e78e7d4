"""What the caller finds in ``parameter.grad`` around a backward that updates parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import ExecutionError
from ...tensors.storage import is_plain, storage_key, uses_of
from ...tensors.tree import flatten
from .groups import PlacedGroups
from .tensor import placeable
from .updates import parameters_of, read_by
from .used_up import UsedUp, is_used_up


class CallersGradients:
    """Refuses what would need gradients that a backward has used up."""

    def __init__(self, groups: PlacedGroups) -> None:
        self._groups = groups
        # optimizers whose parameters a backward has updated, without their own step since, and what it read of them
        self._await_step: MutableMapping[Optimizer, list[Any]] = WeakKeyDictionary()
        self._used_up: set[int] = set()  # by id, the parameters that the last backward has updated
        self._zeros: set[int] = set()  # by id, the parameters whose gradients before it were zeros

    @property
    def during(self) -> bool:
        """Whether a backward updates parameters."""
        return self._groups.plan.during

    @property
    def awaits_step(self) -> bool:
        """Whether an ``optimizer.step()`` has yet to find that nothing is left to do."""
        return bool(self._await_step)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is in a group of the plan."""
        return id(parameter) in self._groups.places

    def are_known_to(self, optimizer: Optimizer) -> bool:
        """Whether the steps of `optimizer`, or of one that it wraps, are done in the backward."""
        wrapped = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
        return bool(self._groups.places) and any(one in self._groups.optimizers for one in (optimizer, *wrapped))

    def use_up(self, updated: set[int]) -> None:
        """After a backward: the gradients of the parameters that it has updated, given by id, are used up. The others
        that had zeros get them back: plain PyTorch updates these, too."""
        owners = (one for one in self._groups.optimizers if not updated.isdisjoint(map(id, parameters_of(one))))
        self._await_step = WeakKeyDictionary({one: read_by(one, updated) for one in owners})
        self._used_up = updated & self._groups.places.keys()
        for parameter in (self._groups.places[key].parameter for key in self._zeros - updated):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in (self._groups.places[key].parameter for key in self._used_up):
            if parameter.grad is None:
                parameter.grad = UsedUp(parameter, self, self._await_step)

    def clear(self) -> None:
        """Remove what stands for gradients that are used up."""
        for places in self._groups.places.values():
            if is_used_up(places.parameter):
                places.parameter.grad = None

    def refuse_earlier(self) -> None:
        """Raise if there are gradients before a backward that updates parameters."""
        updated = {id(p) for one in self._groups.optimizers for p in parameters_of(one)}
        self._zeros = set()
        for one in (one for several in self._groups.members for one in several if id(one.parameter) in updated):
            if (earlier := one.gradient.get()) is not None:
                if earlier.any() or not placeable(earlier):  # part of a tensor that the caller may read or scale
                    raise _accumulates("parameters have gradients before the backward")
                one.gradient.forget()  # zeros, by ``zero_grad(set_to_none=False)``
                self._zeros.add(id(one.parameter))

    def note_parts(self) -> None:
        """Note which gradients are parts of larger tensors that the caller has, who reads and scales those: such
        gradients stay there. Parts that a backward makes are nobody else's."""
        own = [one.gradient for one in self._groups.places.values() if id(one.parameter) not in self._groups.shards]
        there = [t for gradient in own for t in (gradient.get(), gradient.device) if t is not None and is_plain(t)]
        many = Counter(map(storage_key, there))
        kept = {key for t in there if uses_of(t) > many[key := storage_key(t)] + 1}
        for gradient in own:
            found = gradient.get()
            whole = None if found is None or not is_plain(found) else storage_key(found)
            gradient.callers = whole if whole in kept else None

    def watch(self, result: Any) -> None:
        """Have the backward of a step without a plan, whose forward has returned `result`, begin as a planned one's:
        autograd cannot add to what is used up."""
        if any(is_used_up(places.parameter) for places in self._groups.places.values()):
            for tensor in flatten(result)[0]:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.backward_begins())

    def backward_begins(self) -> None:
        """Look at the gradients that the caller has: those that an earlier backward used up have to be cleared.

        Raises:
            ExecutionError: if not, since plain PyTorch would add to them.
        """
        self.note_parts()
        coming = [places.parameter for places in self._groups.places.values() if places.parameter.requires_grad]
        left = [parameter for parameter in coming if is_used_up(parameter)]
        if any(map(_is_stale, left)):
            raise _accumulates("the gradients of the step before are gone, but have not been cleared")
        for parameter in left:
            self._zeros.add(id(parameter))
            parameter.grad = None

    def check_step(self, optimizer: Optimizer, told: bool) -> None:
        """Before ``optimizer.step()``. told: whether the caller gives the step arguments.

        Raises:
            ExecutionError: if the step would have updated the parameters otherwise than the backward has.
        """
        updated = [p for p in parameters_of(optimizer) if id(p) in self._used_up]
        read = self._await_step.pop(optimizer, None)
        if read is None and any(self.has(p) and is_used_up(p) for p in parameters_of(optimizer)):
            raise ExecutionError(
                "this is a second optimizer.step() after one backward, perhaps after one that was refused, and with"
                ' updates="during" the gradients are gone; plan with updates="after"'
            )
        if read is not None and not all(map(_is_stale, updated)):
            raise ExecutionError(
                "parameters got other gradients, or these were cleared between the backward and optimizer.step(),"
                ' after the backward had updated them; plan with updates="after"'
            )
        if read is not None and (told or read != read_by(optimizer, self._used_up)):
            finds = "gets arguments" if told else "finds other parameters or settings than the backward did"
            raise ExecutionError(
                f'optimizer.step() {finds}, and updates="during" has updated the parameters in the backward; plan with'
                ' updates="after"' + ("" if told else ", or change them before the backward")
            )

    def refuse_before_step(self, what: str) -> None:
        """Raise if a backward has updated parameters that plain PyTorch would update in an ``optimizer.step()`` that
        has not come. what: the caller does now."""
        if self._await_step:
            raise _accumulates(f"{what} comes between a backward and optimizer.step()")


def _is_stale(parameter: nn.Parameter) -> bool:
    """Whether its gradient is used up, and the caller has not cleared it, as ``zero_grad(set_to_none=False)`` does."""
    return isinstance(parameter.grad, UsedUp) and not parameter.grad.cleared


def _accumulates(what: str) -> ExecutionError:
    return ExecutionError(
        f'{what}, and updates="during" has no gradients to add to; call optimizer.step() and'
        ' zero_grad(set_to_none=True) before, or plan with updates="after"'
    )
