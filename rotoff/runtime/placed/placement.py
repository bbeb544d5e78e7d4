"""Moves the groups of parameters within and between steps: runs the operations on ``w``, ``g`` and ``o``.

Between steps, each tensor lies where the plan has it at rest. A step that ends early, or an update that the caller
leaves out, needs no special case: the next step begins by bringing everything to rest.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from ...core.sequence import UPDATES, Op, OpKind, Value
from ...errors import ExecutionError
from ...tensors.tree import tensor_leaves
from ..links.base import Link
from ..sharded import Shard
from .callers_gradients import CallersGradients
from .group_updates import GroupUpdates
from .groups import ParameterPlaces, PlacedGroups
from .placed_plan import PlacedPlan
from .tensor import PlacedTensor, offload, prefetch
from .updates import parameters_of
from .used_up import is_used_up, watch


class Placement:
    """The parameters of one model and the states that `optimizers` keep of them.

    gradients, updates: what the caller finds in ``parameter.grad``, and the running update.

    Args:
        link: to the host, which no one else uses. shards: by id of a parameter, its shard, if FSDP2 has sharded it.
    """

    def __init__(self, link: Link, optimizers: Sequence[Optimizer], shards: Mapping[int, Shard]) -> None:
        self.link = link
        self.optimizers = tuple(optimizers)
        self._groups = PlacedGroups(link, self.optimizers, shards)
        self.updates = GroupUpdates(self._groups)
        self.gradients = CallersGradients(self._groups)
        self._rest: list[Op] = []  # operations after ``B 1`` that have not run yet
        self._process = os.getpid()
        method = weakref.WeakMethod(self.before_update)

        def before(*args: Any) -> Any:
            return None if (update := method()) is None else update(*args)

        self._hooks = [(one, one.register_step_pre_hook(before)) for one in self.optimizers]

    # -- between steps

    def begin(self, plan: PlacedPlan) -> None:
        """Bring everything to rest as `plan` says.

        Raises:
            ExecutionError: in a forked process, which does not share the host's bytes.
        """
        self.check_process()
        self._abandon()
        self._rest = []
        for places in self._groups.places.values():
            places.gradient.apart = None  # of a backward that failed
            places.gradient.join()
        self.link.begin()
        self._groups.follow(plan)
        if plan.during:
            watch(self.gradients)
        self.gradients.note_parts()
        self._groups.rest(beginning=True)

    def check_process(self) -> None:
        """Raise ExecutionError in a forked process, which does not share the host's bytes."""
        if not self.here:
            raise ExecutionError(
                "parameters were placed by the process that this one was forked from; train there, or plan here, with"
                " compute_sequence, and run the forward again"
            )

    @property
    def here(self) -> bool:
        """Whether this process has placed the parameters, and not one that it was forked from."""
        return self._process == os.getpid()

    def _abandon(self) -> None:
        if self._groups.step is not None and (step := self._groups.step()) is not None:
            step.abandon()
        self._groups.step = None
        self.updates.give_up(None)

    def takes(self, step: Any) -> None:
        """Note that `step` is running; another one will `abandon` it.

        Raises:
            ExecutionError: if updates come during the backward, and there are gradients before it.
        """
        if self._groups.plan.during:
            self.gradients.refuse_earlier()
        self._groups.step = weakref.ref(step)
        for optimizer, before in self._hooks:  # the caller's find the gradients and the parameters of their time
            ordered: Any = optimizer  # its hooks are in an ordered dictionary
            ordered._optimizer_step_pre_hooks.move_to_end(before.id)

    def close(self, resident: bool = True) -> None:
        """Return everything to the caller, on the device if `resident`, else where it lies; and free the host's
        bytes."""
        self._abandon()
        if self.gradients.awaits_step:
            warnings.warn(
                "rotoff: closed between a backward that has updated the parameters and optimizer.step(), which finds"
                " nothing left to do",
                RuntimeWarning,
                stacklevel=2,
            )
            self.gradients.clear()
        self.updates.host.close()
        for _, before in self._hooks:
            before.remove()
        if resident:
            self._groups.give_back()
        self._groups.places.clear()
        self.link.close()

    # -- within a step

    def forward_begins(self) -> None:
        """Before a forward, with a plan or without one.

        Raises:
            ExecutionError: if the forward comes between a backward that has updated parameters and its step.
        """
        self.gradients.refuse_before_step("this forward")
        self.updates.begun = []

    def operate(self, op: Op) -> list[PlacedTensor]:
        """Run an update, or a move of ``w``, ``g`` or ``o``; returns what has moved."""
        self.check_process()
        if op.kind in UPDATES:
            self.updates.update(op)
            return []
        if op.of == "w" and self._groups.shards and op.kind in (OpKind.PREFETCH, OpKind.WAIT):
            return []  # FSDP2 reads it where it is
        if op.of != "g":
            self.updates.host.join(op.stage)
        begun = op.stage in self.updates.begun
        if op.kind is OpKind.PREFETCH and op.value in self._groups.plan.early and begun:
            return []  # it comes when the next step begins, since the caller may change it before
        updating = begun and self.link.queues and op.of == "g"  # the host's thread; only it may read the caller's
        groups = self._groups
        tensors = [one for one in groups.tensors(op.value) if updating or not groups.with_autograd(one)]
        if op.kind is OpKind.PREFETCH and not updating:
            prefetch(tensors)
        elif op.kind is OpKind.OFFLOAD and not updating:
            with tensors[0].lane() if tensors else nullcontext():
                offload(tensors)
        else:
            for tensor in tensors:
                if op.kind is OpKind.WAIT:
                    tensor.settle()
                elif updating:
                    tensor.let_go()
                else:
                    tensor.release()
        return tensors

    def arrived(self, parameter: torch.Tensor) -> None:
        """A gradient has come in a step without a plan: it goes to the host, if the parameter is sharded."""
        if id(parameter) in self._groups.shards and (places := self._groups.places.get(id(parameter))) is not None:
            places.gradient.release()
            places.gradient.join()

    def lent(self) -> list[ParameterPlaces]:
        """Return the places of the parameters that the plan moves within a step, or that lie on the host because their
        gradients do, to which the next are added."""
        groups = self._groups
        pairs = ((k, one) for k, several in enumerate(groups.members, start=1) for one in several)
        return [one for k, one in pairs if k in groups.plan.moved or one.weight.on_host]

    def away(self) -> list[ParameterPlaces]:
        """Return the places of the parameters that lie on the host."""
        return [places for places in self._groups.places.values() if places.weight.on_host]

    @property
    def room(self) -> int:
        """Bytes for parameters on the device, in a forward that saves nothing."""
        return self._groups.plan.room

    def is_whole(self, k: int) -> bool:
        """Whether each parameter of group k has a gradient."""
        places = self._groups.updatable(k)
        return all(one.gradient.get() is not None for one in places if one.parameter.requires_grad)

    @property
    def waits(self) -> bool:
        """Whether no step is planned yet."""
        return self._groups.plan.waits

    def clear(self, host_limit: float) -> None:
        """Between steps: move all that is placed to the host, unless that takes more than `host_limit`; the next step
        brings back what its plan keeps on the device."""
        if not self.waits and self._groups.plan.host_bytes <= host_limit:
            nothing = frozenset[Value]()
            with torch.inference_mode(False), torch.no_grad():
                self.begin(replace(self._groups.plan, resident=nothing, early=nothing, waits=True, room=0))

    @property
    def between_steps(self) -> bool:
        """Whether no step runs or waits for its update, so that everything may be moved."""
        running = self._groups.step is not None and self._groups.step() is not None
        return not (running or self._rest or self.gradients.awaits_step)

    @property
    def tight(self) -> bool:
        """Whether the plan leaves no bytes for a group of parameters on the host, in a forward that saves nothing."""
        groups = self._groups.members
        away = [[one.parameter.nbytes for one in several if one.weight.on_host] for several in groups]
        return self.room <= max(map(sum, away), default=0)

    def beside_parameters(self) -> list[torch.Tensor]:
        """Return the gradients and optimizer states, wherever they lie."""
        gradients = [p.grad for one in self.optimizers for p in parameters_of(one) if not is_used_up(p)]
        return tensor_leaves([gradients, *(state for one in self.optimizers for state in one.state.values())])

    @property
    def away_bytes(self) -> int:
        """The bytes of parameters, gradients and optimizer states that lie on the host."""
        every = (one for of in self._groups.places.values() for one in of.tensors())
        return sum(t.nbytes for one in every if one.on_host and (t := one.get()) is not None)

    def wait(self, plan: Callable[[], PlacedPlan] | None) -> None:
        """Until a step is planned, place everything as `plan()` says; None: on the device."""
        with torch.inference_mode(False), torch.no_grad():
            if plan is not None and not self._groups.planned:
                self.begin(plan())
            elif plan is None and self._groups.planned and self.waits:
                self._groups.give_back()

    def backward_done(self, operations: Sequence[Op]) -> None:
        """End the backward. Of the `operations` left, run those that come before the caller's ``optimizer.step()``."""
        during = self._groups.plan.during
        self._groups.step, self._rest = None, list(operations)
        try:
            while self._rest and (during or self._rest[0].kind not in UPDATES):
                self.operate(self._rest.pop(0))
            if during:
                self.gradients.use_up(self.updates.end())
            else:
                self._groups.hand_over()
        except BaseException as error:
            self.updates.give_up(error)
            raise

    # -- the caller's ``optimizer.step()``

    def before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before ``optimizer.step()``: do its work group by group, so that it finds only what belongs to no group,
        as other models' parameters do. A closure is called first, as the step would; the step gets one that returns the
        same loss.

        Raises:
            ExecutionError: within a backward of the model, and in a forked process.
        """
        if self._groups.planned:
            self.check_process()
        if self._groups.planned and self._groups.step is not None and torch._C._current_graph_task_id() != -1:
            raise ExecutionError(
                "optimizer.step() was called within the backward, as by a hook of a parameter; leave it out there, call"
                ' it after the backward, and plan with updates="during", which updates parameters as gradients come'
            )
        given: dict[Any, Any] = {**dict(enumerate(args[1:])), **kwargs}
        closure = next((name for name, value in given.items() if callable(value)), None)
        if closure is not None:
            with torch.enable_grad():
                loss = given[closure]()
            given[closure] = lambda: loss
        left, args = args[0], tuple(map(given.pop, range(len(args) - 1)))
        if self._groups.planned:
            left = self._update_all(optimizer, left, args, given)
        return (left, *args), given

    def _update_all(self, optimizer: Optimizer, left: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """left: of what no other model has updated; returns one of what this has not."""
        self._abandon()  # of a forward whose backward has not come, which would find other parameters then
        self.gradients.check_step(
            optimizer, any(given is not None and not callable(given) for given in (*args, *kwargs.values()))
        )
        self.updates.begin(left, args, kwargs)
        rest, self._rest = self._rest, []
        try:
            for op in rest:
                self.operate(op)
            return self.updates.finish()
        except BaseException as error:
            self.updates.give_up(error)
            raise
