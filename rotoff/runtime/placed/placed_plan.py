"""Where a plan has the parameters, their gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...core.sequence import Value
from .tensor import room_of


@dataclass(frozen=True, eq=False)
class PlacedGroup:
    """The parameters of one group of the chain. state_bytes: of the optimizer's state of each parameter."""

    parameters: tuple[nn.Parameter, ...]
    state_bytes: tuple[int, ...]


@dataclass(frozen=True)
class PlacedPlan:
    """How a plan places the parameters.

    groups: in the chain's order.
    resident: the values that the device holds between steps.
    moved: the groups whose parameters are moved within a step.
    early: parameters that lie on the host between steps and are prefetched when a step begins.
    outside: parameters that stay on the device.
    during: whether groups are updated within the backward.
    room: bytes for parameters on the device, in a forward that saves nothing.
    on_host: whether the host's processor can run the optimizers.
    waits: whether no step is planned yet.
    """

    groups: tuple[PlacedGroup, ...]
    resident: frozenset[Value]
    moved: frozenset[int]
    early: frozenset[Value] = frozenset()
    outside: tuple[nn.Parameter, ...] = ()
    during: bool = False
    room: int = 0
    on_host: bool = True
    waits: bool = False

    @property
    def host_bytes(self) -> int:
        """Host bytes for parameters, gradients and optimizer state."""
        pairs = [pair for group in self.groups for pair in zip(group.parameters, group.state_bytes, strict=True)]
        return sum(room_of(parameter) * (1 + parameter.requires_grad) + state for parameter, state in pairs)


NOTHING = PlacedPlan((), frozenset(), frozenset(), waits=True)  # is placed
