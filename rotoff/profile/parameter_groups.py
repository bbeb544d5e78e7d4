"""The groups of parameters of a measured model: which stages read them, their bytes, and the cost of updating them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..accelerator import block_bytes
from ..capture.unrepeatable import compiled, takes_fast_path
from ..core.parameters import ParameterGroup, in_parts
from ..runtime.placed.placed_plan import PlacedGroup
from ..runtime.placed.tensor import placeable, room_of
from ..tensors.stage import StageModule, users_of_parameters
from ..tensors.storage import rounded, storage_key
from .optimizer_probe import OptimizerProbe
from .profile import Profile


@dataclass(frozen=True)
class FoundGroups:
    """Groups of parameters.

    Attributes:
        costs: for the chain.
        placed: the parameters of each group.
        outside_bytes: of the parameters that stay on the device, with gradients and optimizer states; and of buffers
            and states that are scalars.
        outside_update_bytes: what updating those takes. update_bytes: what updating all at once takes.
        first_bytes: for each group, the most that the first update of one of its parameters takes and leaves behind; 0
            unless host and device are one.
        outside: the parameters that stay on the device.
        before: of `outside`, the frozen parameters of layers before the chain.
        streamed: those of `before` that lie on the host between their uses.
    """

    costs: tuple[ParameterGroup, ...]
    placed: tuple[PlacedGroup, ...]
    outside_bytes: int
    outside_update_bytes: int
    update_bytes: int
    first_bytes: tuple[int, ...]
    outside: tuple[nn.Parameter, ...]
    before: tuple[PlacedGroup, ...] = ()
    streamed: tuple[PlacedGroup, ...] = ()

    @property
    def placed_bytes(self) -> int:
        """The bytes of all parameters, gradients and optimizer states that can be placed, but for those `before`."""
        return sum(one.bytes + one.grad_bytes + one.state_bytes for one in self.costs)

    @property
    def staying(self) -> tuple[nn.Parameter, ...]:
        """The parameters `outside` that are not `streamed`."""
        away = {id(parameter) for group in self.streamed for parameter in group.parameters}
        return tuple(parameter for parameter in self.outside if id(parameter) not in away)

    @property
    def staying_bytes(self) -> int:
        """The `outside_bytes`, without those that are `streamed`."""
        return self.outside_bytes - sum(group.nbytes for group in self.streamed)

    def streaming(self, nbytes: float) -> FoundGroups:
        """Return these with as many of the last groups `before` streamed as free `nbytes`. No other bytes cost the link
        less: they are copied once a step, and in one direction."""
        staying, freed = list(self.before), 0
        while staying and freed < nbytes:
            freed += staying.pop().nbytes
        return replace(self, streamed=self.before[len(staying) :])

    def streaming_less(self, nbytes: int) -> FoundGroups:
        """Return these with as many of the first groups resident again as `nbytes` have room for."""
        streamed = list(self.streamed)
        while streamed and streamed[0].nbytes <= nbytes:
            nbytes -= streamed.pop(0).nbytes
        return replace(self, streamed=tuple(streamed))


def find_groups(
    model: nn.Module,
    profile: Profile,
    probe: OptimizerProbe,
    host: bool,
    may_move: Callable[[nn.Parameter], bool] = placeable,
) -> FoundGroups:
    """Group the parameters of each stage, or of the stages that share them; large groups are split, and trained and
    frozen parameters are kept apart.

    Parameters stay on the device if no stage reads them, if a compiled module reads them, if they share a storage with
    others or with buffers, or if autocast casts them for several calls: it keeps casts of leaf tensors alone, and the
    tensor that stands for a parameter that moves is none.

    Args:
        profile: of the model.
        host: whether the host may update a group. On the CPU, host and device are the same processor.
        may_move: whether a parameter can be placed.
    """
    stages, device = profile.stages, profile.device
    readers, block = _readers(stages), block_bytes(device)
    every = list({id(p): p for p in model.parameters()}.values())
    staying = _sharing(every, model.buffers()) | {id(module._parameters[name]) for module, name in profile.cast_again}
    movable = [p for p in every if id(p) not in staying and may_move(p)]
    members: dict[tuple[tuple[int, ...], bool, bool], list[nn.Parameter]] = {}
    for parameter in (p for p in movable if id(p) in readers):
        key = tuple(readers[id(parameter)]), parameter.requires_grad, probe.updates(parameter)
        members.setdefault(key, []).append(parameter)
    grouped = {id(p) for several in members.values() for p in several}
    outside = [p for p in every if id(p) not in grouped]
    costs, placed, first = [], [], []
    whole = sum(room_of(p) for several in members.values() for p in several)
    parts = [
        (key, part) for key in sorted(members) for part in in_parts(members[key], map(room_of, members[key]), whole)
    ]
    for (stages_of, needs, updated), parameters in parts:
        nbytes = sum(rounded(room_of(p), block) for p in parameters)
        states = tuple(probe.state_bytes(p) for p in parameters)
        costs.append(
            ParameterGroup(
                stages=stages_of,
                bytes=nbytes,
                grad_bytes=nbytes if needs else 0,
                state_bytes=sum(states) if needs else 0,  # those of frozen parameters lie on the host
                update_time=probe.update_time(parameters),
                host_update_time=probe.host_update_time(parameters) if host and needs else None,
                update_transient_bytes=probe.update_bytes(parameters) if updated else 0,
                name="..".join(dict.fromkeys(stages[i - 1].name for i in (stages_of[0], stages_of[-1]))),
            )
        )
        placed.append(PlacedGroup(tuple(parameters), states, costs[-1].name))
        here = updated and device.type == "cpu"
        first.append(max(probe.update_bytes([p]) + n for p, n in zip(parameters, states, strict=True)) if here else 0)
    buffers = {storage_key(b): b.untyped_storage().nbytes() for b in model.buffers()}
    outside_bytes = sum(buffers.values()) + probe.unplaced_bytes(every)
    shared = users_of_parameters(stages)  # autograd holds their gradients beside what `.grad` holds
    outside_bytes += sum(p.nbytes * (1 + p.requires_grad * (1 + (p in shared))) + probe.state_bytes(p) for p in outside)
    updates = probe.update_bytes(outside), probe.update_bytes(every)
    groups = tuple(costs), tuple(placed), outside_bytes, *updates, tuple(first), tuple(outside)
    return FoundGroups(*groups, _before(profile.prefix, probe, (p for p in movable if id(p) not in grouped)))


def groups_apart(model: nn.Module, probe: OptimizerProbe) -> tuple[tuple[PlacedGroup, ...], tuple[nn.Parameter, ...]]:
    """Return a group of each parameter that can be placed, and the other parameters; nothing has been measured."""
    every = list({id(p): p for p in model.parameters()}.values())
    unseen = (module for module in model.modules() if _is_unseen(module))
    staying = _sharing(every, model.buffers()) | {id(p) for module in unseen for p in module.parameters()}
    movable = [p for p in every if id(p) not in staying and placeable(p)]
    moved = {id(p) for p in movable}
    groups = (PlacedGroup((p,), (probe.state_bytes(p),)) for p in movable)
    return tuple(groups), tuple(p for p in every if id(p) not in moved)


def _before(
    prefix: Sequence[StageModule], probe: OptimizerProbe, parameters: Iterable[nn.Parameter]
) -> tuple[PlacedGroup, ...]:
    """Return the frozen ones of `parameters` that `prefix` reads, in the order in which it does, in groups of at most
    the largest one's bytes: a recorded prefix is one stage."""
    readers, frozen = _readers(prefix), {id(p): p for p in parameters if not p.requires_grad}
    groups: list[list[nn.Parameter]] = []
    most = max((p.nbytes for p in frozen.values()), default=0)
    for parameter in (frozen[key] for key in readers if key in frozen):
        if groups and sum(p.nbytes for p in groups[-1]) + parameter.nbytes <= most:
            groups[-1].append(parameter)
        else:
            groups.append([parameter])
    return tuple(
        PlacedGroup(tuple(g), tuple(map(probe.state_bytes, g)), prefix[readers[id(g[0])][0] - 1].name) for g in groups
    )


def _readers(stages: Sequence[StageModule]) -> dict[int, list[int]]:
    """Return the stages that read each parameter (by id), except in compiled modules."""
    found: dict[int, list[int]] = {}
    for i, stage in enumerate(stages, start=1):
        inside = {id(p) for module in stage.every_module() if _is_unseen(module) for p in module.parameters()}
        for key in dict.fromkeys(id(p) for module in stage.modules for p in module.parameters()):
            if key not in inside:
                found.setdefault(key, []).append(i)
    return found


def _is_unseen(module: nn.Module) -> bool:
    return compiled(module) or takes_fast_path(module)


def _sharing(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of tensors that share a storage with another one."""
    by_storage: dict[int, list[int]] = {}
    for tensor in (*parameters, *buffers):
        by_storage.setdefault(storage_key(tensor), []).append(id(tensor))
    return {one for several in by_storage.values() if len(several) > 1 for one in several}
