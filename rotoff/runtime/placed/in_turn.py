"""Frozen layers before the chain whose parameters lie on the host of a device: one after the other comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .tensor import PlacedParameter, prefetch, room_of, settle


class InTurn:
    """Gives calls the copies of such parameters on the device. A group comes while the one before it computes, and goes
    when the next is needed.

    groups: the places of the parameters of each layer, in the order of the forward.
    """

    def __init__(self, groups: Sequence[Sequence[PlacedParameter]]) -> None:
        self._groups = groups
        self._at = -1  # the group that computes
        self._found = {id(place.get()): (k, place) for k, group in enumerate(groups) for place in group}

    def bring(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the copy of `parameter`; None if it is not one of these."""
        k, place = self._found.get(id(parameter), (-1, None))
        if place is None:
            return None
        if k != self._at:
            self._let_go(keep=(k, k + 1))
            self._at = k
            prefetch(self._groups[k])
            settle(self._groups[k])
            for following in self._groups[k + 1 : k + 2]:
                prefetch(following)
        return None if place.device is None else place.device.detach()

    def all(self) -> dict[int, torch.Tensor]:
        """Return copies of all, by id of the parameter, for a call that is repeated."""
        return {
            id(p): p.detach().to(place._link.device)
            for _, place in self._found.values()
            if (p := place.get()) is not None
        }

    def end(self) -> None:
        """Free all copies."""
        self._let_go()

    def _let_go(self, keep: Sequence[int] = ()) -> None:
        for k, group in enumerate(self._groups):
            for place in group:
                if k not in keep and place.device is not None:
                    place.let_go()
        self._at = -1


def bytes_in_turn(groups: Sequence[Sequence[nn.Parameter]]) -> int:
    """The bytes that `InTurn` takes at most: those of two groups that follow each other."""
    sizes = [sum(map(room_of, group)) for group in groups]
    return max((one + other for one, other in zip(sizes, [*sizes[1:], 0], strict=False)), default=0)
