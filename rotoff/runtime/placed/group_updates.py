"""The update of all groups, one by one: within a backward, or when the caller's ``optimizer.step()`` runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

from ...core.sequence import Op, OpKind, o, w
from .groups import ParameterPlaces, PlacedGroups
from .tensor import prefetch
from .updates import Chunks, HostLane, counts_changes


class GroupUpdates:
    """Updates `groups`.

    begun: the groups whose update has begun since the last step began.
    host: the lane for updates of what lies on the host.
    """

    def __init__(self, groups: PlacedGroups) -> None:
        self.begun: list[int] = []
        self.host = HostLane(groups.link.queues)
        self._groups = groups
        self._chunks: list[Chunks] = []  # of the running update
        self._in_backward = False  # whether the running update is within a backward

    def begin(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin the update of ``optimizer.step(*args, **kwargs)``."""
        self._chunks = [Chunks(optimizer, args, kwargs)]
        self.begun = self.begun if self._groups.plan.during else []

    def finish(self) -> Any:
        """End the update of `begin`. Groups that no operation has updated are updated now, on the host if it can run
        the optimizers. Returns an optimizer of what belongs to no group."""
        here = self._groups.plan.on_host
        for k in range(1, len(self._groups.members) + 1):
            if k not in self.begun:
                self.update(Op(OpKind.H if here else OpKind.U, k))
                for tensor in () if here else self._groups.tensors(w(k)) + self._groups.tensors(o(k)):
                    tensor.release()
        self.host.join()
        chunks = self._chunks[0]
        self.end()
        return chunks.left()

    def end(self) -> set[int]:
        """End an update of all groups: put everything to rest for the caller, with no copy running. Returns, by id,
        what it has updated."""
        self.host.join()
        self._groups.rest(beginning=False)
        for places in self._groups.places.values():
            places.gradient.join()  # the caller's from now on
        updated = {key for one in self._chunks for key in one.updated}
        self._chunks, self._in_backward = [], False
        return updated

    def update(self, op: Op) -> None:
        """Run ``U k``, on the device, or ``H k``, on the host."""
        for one in self._groups.members[op.stage - 1]:
            if one.trained and (shard := self._groups.shards.get(id(one.parameter))) is not None:
                shard.refuse_gathered()
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
        places = groups.updatable(k)
        gradients = [one.gradient for one in places]
        changed = groups.tensors(w(k)) + groups.tensors(o(k))
        if apart:
            prefetch([*changed, *gradients])
        for tensor in changed:
            tensor.hand_over(changes=True)
        counted = all(map(counts_changes, groups.optimizers))
        for gradient in gradients:
            gradient.hand_over(counted=counted)
        _step(self._chunks, places)
        for one in places:
            if self._in_backward and _is_updated(self._chunks, one):
                one.gradient.let_go()
                one.gradient.forget()
            elif self._in_backward or (one.gradient.leaving and not (apart and w(k) in groups.plan.resident)):
                one.gradient.release()

    def _update_on_host(self, k: int) -> None:
        """Update group k on the host; without a device of its own, where its tensors lie: then the state that a first
        update makes goes to the host before that of the next parameter is made."""
        groups, chunks, within = self._groups, self._chunks, self._in_backward
        apart, resident, places = groups.link.queues, o(k) in groups.plan.resident, groups.updatable(k)
        tensors = [*groups.tensors(w(k)), *(one.gradient for one in places), *groups.tensors(o(k))] if apart else []
        for tensor in tensors:
            tensor.show_host()

        def update() -> None:
            for tensor in tensors:
                tensor.arrive()
            for one in places:
                _step(chunks, [one])
                if within and _is_updated(chunks, one):
                    one.gradient.forget()
                if not apart:
                    for state in one.states():
                        state.rest(resident)

        self.host.run(k, update)

    def give_up(self, error: BaseException | None) -> None:
        """Abort the running update, if there is one; say in a note of `error`, or in a warning if nobody here has seen
        one, what it has updated."""
        if not self._chunks:
            return
        what = "a backward that updates parameters" if self._in_backward else "optimizer.step()"
        chunks, self._chunks, self._in_backward = self._chunks, [], False
        with suppress(BaseException):
            self.host.join()
        for said in (f"rotoff: {what} ended early; {one.told()}" for one in chunks):
            if error is None:
                warnings.warn(said, RuntimeWarning, stacklevel=2)
            elif hasattr(error, "add_note"):  # Python 3.11
                error.add_note(said)


def _step(chunks: Sequence[Chunks], places: Sequence[ParameterPlaces]) -> None:
    """Update some parameters, by the gradients that are in ``parameter.grad`` or apart from it."""
    gradients = {id(one.parameter): apart for one in places if (apart := one.gradient.apart) is not None}
    for each in chunks:
        each.step([one.parameter for one in places], gradients)


def _is_updated(chunks: Sequence[Chunks], places: ParameterPlaces) -> bool:
    return any(id(places.parameter) in one.updated for one in chunks)
