"""What the caller finds in ``parameter.grad`` around an update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import ExecutionError
from ...tensors.tree import flatten
from .groups import PlacedGroups
from .guard import Marks
from .tensor import placeable
from .updates import parameters_of, read_by


class CallersGradients:
    """Hides gradients from an optimizer that has nothing left to do for them, and refuses what would need gradients
    that a backward has used up, which are marked."""

    def __init__(self, groups: PlacedGroups) -> None:
        self._groups = groups
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        # optimizers whose parameters a backward has updated, without their own step since, and what it read of them
        self._await_step: dict[Optimizer, list[Any]] = {}
        self.marks = Marks()
        self._used_up: set[int] = set()  # by id, the parameters that the last backward has updated
        self._zeros: set[int] = set()  # by id, the parameters whose gradients before it were zeros

    def use_up(self, updated: set[int]) -> None:
        """After a backward: mark the gradients of the parameters that it has updated, given by id. The others that had
        zeros get them back: plain PyTorch updates these, too."""
        owners = (one for one in self._groups.optimizers if not updated.isdisjoint(map(id, parameters_of(one))))
        self._await_step = {one: read_by(one) for one in owners}
        self._used_up = updated & self._groups.places.keys()
        for parameter in (self._groups.places[key].parameter for key in self._zeros - updated):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        places = [self._groups.places[key] for key in self._used_up]
        for one in places:
            one.gradient.mark()
        self.marks.note(one.parameter for one in places if one.gradient.marked)
        self.marks.awaited = bool(self._await_step)

    def refuse_earlier(self) -> None:
        """Raise if there are gradients before a backward that updates parameters."""
        updated = {id(p) for one in self._groups.optimizers for p in parameters_of(one)}
        self._zeros = set()
        for key in (id(p) for p in self._groups.every() if id(p) in updated):
            gradient = self._groups.places[key].gradient
            if (earlier := gradient.get()) is not None:
                if earlier.any() or not placeable(earlier):  # part of a tensor that the caller may read or scale
                    raise _accumulates("parameters have gradients before the backward")
                gradient.forget()  # zeros, by ``zero_grad(set_to_none=False)``
                self._zeros.add(key)

    def watch(self, result: Any) -> None:
        """Have the backward of a step without a plan, whose forward has returned `result`, begin as a planned one's:
        autograd cannot add to marks."""
        if any(places.gradient.marked for places in self._groups.places.values()):
            for tensor in flatten(result)[0]:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.backward_begins())

    def backward_begins(self) -> None:
        """Check that the caller has cleared the gradients that an earlier backward used up.

        Raises:
            ExecutionError: if not, since plain PyTorch would add to them.
        """
        coming = {key: one.gradient for key, one in self._groups.places.items() if one.parameter.requires_grad}
        if any(gradient.stale for gradient in coming.values()):
            raise _accumulates("the gradients of the step before are gone, but have not been cleared")
        for key, gradient in coming.items():
            if gradient.marked:  # and zeroed since
                self._zeros.add(key)
            gradient.unmark()
        self.marks.note(self.marks.left())  # each takes a few bytes

    def hide_marks(self, optimizer: Optimizer, told: bool) -> None:
        """Before ``optimizer.step()``: hide the marks. told: whether the caller gives the step arguments.

        Raises:
            ExecutionError: if the step would have updated the parameters otherwise than the backward has.
        """
        placed = [(p, self._groups.places.get(id(p))) for p in parameters_of(optimizer)]
        marked = [p for p, places in placed if places is not None and places.gradient.marked]
        awaited = optimizer in self._await_step
        used_up = [places.gradient for p, places in placed if places is not None and id(p) in self._used_up]
        if awaited and any(one.get() is None and not one.stale for one in used_up):
            self._has_stepped(optimizer)
            raise ExecutionError(
                "gradients were cleared between the backward and optimizer.step(), and"
                ' updates="during" has updated the parameters in the backward; plan with updates="after"'
            )
        if marked and not awaited:
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
        self._has_stepped(optimizer)
        self.hide(marked)

    def _has_stepped(self, optimizer: Optimizer) -> None:
        self._await_step.pop(optimizer, None)
        self.marks.awaited = bool(self._await_step)

    def hide(self, parameters: list[nn.Parameter]) -> None:
        """Hide the gradients of `parameters` until `show`, so that the optimizer's own step finds nothing to do."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def show(self) -> None:
        """Put the hidden gradients back."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient

    def refuse_before_step(self, what: str) -> None:
        """Raise if a backward has updated parameters that plain PyTorch would update in an ``optimizer.step()`` that
        has not come. what: the caller does now."""
        if self._await_step:
            raise _accumulates(f"{what} comes between a backward and optimizer.step()")


def _accumulates(what: str) -> ExecutionError:
    return ExecutionError(
        f'{what}, and updates="during" has no gradients to add to; call optimizer.step() and'
        ' zero_grad(set_to_none=True) before, or plan with updates="after"'
    )
