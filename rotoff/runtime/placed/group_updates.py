"""The update of all groups, one by one: within a backward, or when the caller's ``optimizer.step()`` runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

from ...core.sequence import Op, OpKind, g, o, w
from ...errors import ExecutionError
from .groups import PlacedGroups
from .tensor import prefetch, settle
from .updates import Chunks, HostLane, counts_changes
from .used_up import is_used_up


class GroupUpdates:
    """Updates `groups`.

    begun: the groups whose update has begun since the last step began.
    gone: by id, the parameters updated within the last backward.
    host: the lane for updates of what lies on the host.
    """

    def __init__(self, groups: PlacedGroups) -> None:
        self.begun: list[int] = []
        self.gone: set[int] = set()
        self.host = HostLane(groups.link.queues)
        self._groups = groups
        self._chunks: list[Chunks] = []  # of the running update
        self._in_backward = False  # whether the running update is within a backward

    def step_begins(self) -> None:
        """Begin a training step, which updates each group once."""
        self.begun, self.gone = [], set()

    def begin(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin the update of ``optimizer.step(*args, **kwargs)``.

        Raises:
            ExecutionError: if a gradient came after its parameter had been updated within the backward.
        """
        self._refuse_late_gradients()
        self._chunks = [Chunks(optimizer, args, kwargs)]
        self.begun = self.begun if self._groups.plan.during else []

    def finish(self) -> None:
        """End the update of `begin`. Groups that no operation has updated are updated now, on the host if it can run
        the optimizers."""
        here = self._groups.plan.on_host
        for k in self._groups.numbers:
            if k not in self.begun:
                self.update(Op(OpKind.H if here else OpKind.U, k))
                for tensor in () if here else self._groups.tensors(w(k)) + self._groups.tensors(o(k)):
                    tensor.release()
        self.host.join()
        self._chunks[0].step()  # what belongs to no group
        self.end()

    def end(self) -> None:
        """End an update of all groups: put everything to rest for the caller, with no copy running."""
        self.host.join()
        self._groups.rest(beginning=False)
        for places in self._groups.places.values():
            places.gradient.join()  # the caller's from now on
        if self._in_backward:
            self.gone = {key for one in self._chunks for key in one.updated}
        self._chunks, self._in_backward = [], False

    def update(self, op: Op) -> None:
        """Run ``U k``, on the device, or ``H k``, on the host."""
        if not self._chunks:
            self._in_backward = True
            self._chunks = [Chunks(optimizer) for optimizer in self._groups.optimizers]
        self.begun.append(op.stage)
        if op.kind is OpKind.H:
            self._update_on_host(op.stage)
        else:
            self._update_on_device(op.stage)

    def _update_on_device(self, k: int) -> None:
        groups, apart = self._groups, self._groups.link.queues
        parameters = groups.updatable(k)
        gradients = [groups.places[id(p)].gradient for p in parameters]
        changed = groups.tensors(w(k)) + groups.tensors(o(k))
        if apart:
            prefetch([*changed, *gradients])
        settle([*changed, *gradients])
        for tensor in changed:
            tensor.hand_over(changes=True)
        counted = all(map(counts_changes, groups.optimizers))
        for gradient in gradients:
            gradient.hand_over(counted=counted)
        for chunks in self._chunks:
            chunks.step(parameters, groups.apart(parameters))
        for p, gradient in zip(parameters, gradients, strict=True):
            if self._in_backward and any(id(p) in one.updated for one in self._chunks):
                gradient.let_go()
                gradient.forget()
            elif self._in_backward or (gradient.leaving and not (apart and w(k) in groups.plan.resident)):
                gradient.release()

    def _update_on_host(self, k: int) -> None:
        """Update group k on the host; without a device of its own, where its tensors lie: then the state that a first
        update makes goes to the host before that of the next parameter is made."""
        groups, within = self._groups, self._in_backward
        apart, resident = groups.link.queues, o(k) in groups.plan.resident
        tensors = [tensor for v in (w(k), g(k), o(k)) for tensor in groups.tensors(v)] if apart else []
        for tensor in tensors:
            if not groups.with_autograd(tensor):
                tensor.show_host()
        chunks, parameters = self._chunks, groups.updatable(k)

        def update() -> None:
            for tensor in tensors:
                tensor.arrive()
            for parameter in parameters:
                for one in chunks:
                    one.step([parameter], groups.apart([parameter]))
                if within and any(id(parameter) in one.updated for one in chunks):
                    groups.places[id(parameter)].gradient.forget()
                if not apart:
                    for state in groups.states(parameter):
                        state.rest(resident)

        self.host.run(k, update)

    def _refuse_late_gradients(self) -> None:
        groups = self._groups
        late = [
            k
            for k in self.begun
            for p in groups.parameters(k)
            if p.grad is not None and id(p) in self.gone and not is_used_up(p)
        ]
        if late:
            raise ExecutionError(
                f"parameters of {groups.name(late[0])} got gradients from outside of the model after the backward had"
                ' updated them; plan with updates="after"'
            )

    def give_up(self, error: BaseException | None) -> list[Chunks]:
        """Abort an update; add to `error` what has been updated."""
        chunks, self._chunks, self._in_backward = self._chunks, [], False
        with suppress(BaseException):
            self.host.join()
        if error is not None:
            for one in chunks:
                one.explain(error)
        return chunks

    def backward_failed(self, error: BaseException | None) -> None:
        """Abort the updates of a backward that ended early; add to `error`, or else warn, what it has updated."""
        if not self._in_backward:
            return
        updated = {key for one in self.give_up(error) for key in one.updated}
        names: list[list[str]] = [[], [], []]
        for k in self._groups.numbers:
            if trained := [p for p in self._groups.parameters(k) if p.requires_grad]:
                whole = all(id(p) in updated for p in trained)
                names[0 if whole else 1 if k in self.begun else 2].append(self._groups.name(k))
        all_of, partly, not_yet = (", ".join(some) or "none" for some in names)
        said = (
            f"rotoff: a backward that updates parameters ended early; it has updated {all_of}, perhaps in part"
            f" {partly}, and not {not_yet}"
        )
        if error is None:
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        elif hasattr(error, "add_note"):  # Python 3.11
            error.add_note(said)
