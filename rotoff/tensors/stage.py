"""A stage of a model: modules that run one after another, and the value that flows between stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .lifetimes import UNSEEN, Lifetimes
from .recipe import Recipe
from .tree import flatten

TRAINING = "training"


class Copy(nn.Module):
    """Returns a copy of its input; placed before a module that would change the caller's batch in place."""

    def forward(self, value: Any) -> Any:
        tensors, rebuild = flatten(value)
        return rebuild([t.clone() for t in tensors])


def stage_inputs(tensors: Iterable[torch.Tensor], needs_grad: Iterable[bool]) -> list[torch.Tensor]:
    """Return `tensors` cut from their graph, for a run of a stage by itself. Like those of a step they are not leaves:
    autocast casts a leaf once for all its uses, and keeps the cast to the end of the region."""
    leaves = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, needs_grad, strict=True)]
    with torch.enable_grad():
        return [t.view_as(t) if t.requires_grad else t for t in leaves]


def names_in(outer: nn.Module, table: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, name) of all "_parameters" or "_buffers" of `outer` and its submodules."""
    for module in outer.modules():
        yield from ((module, name) for name, one in getattr(module, table).items() if one is not None)


@dataclass(frozen=True)
class StageModule:
    """Modules that run in order; the output of one is the only argument of the next.

    name: for messages and tables, such as ``"blocks.3"`` or ``"relu..flatten"``. storages: of a recorded model, the
    number of the storage of each output tensor. lives: how long the plain model holds the storages that it makes.
    """

    name: str
    modules: tuple[nn.Module, ...]
    storages: tuple[int | None, ...] = ()
    lives: Lifetimes = UNSEEN

    def run(self, value: Any) -> Any:
        for module in self.modules:
            value = module(value)
        return value

    def merged(self, following: StageModule) -> StageModule:
        """Return this stage and the one after it as one."""
        name = f"{self.name.split('..')[0]}..{following.name.split('..')[-1]}"
        return StageModule(
            name, self.modules + following.modules, following.storages, self.lives.and_then(following.lives)
        )

    @property
    def varying(self) -> bool:
        """Whether the number and sizes of its saved tensors may depend on data."""
        return any(getattr(module, "varying", False) is True for module in self.modules)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that need a gradient, each once."""
        found = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(found.values())

    def modes(self) -> tuple[tuple[nn.Module, str, bool], ...]:
        """Return (module, name, value) of the settings that determine what a run saves, and that may change between a
        forward and its backward: `requires_grad` of each parameter, and "training" of each module."""
        found: dict[tuple[nn.Module, str], bool] = {}
        for module, name in self._names_read("_parameters"):
            if (parameter := module._parameters[name]) is not None:
                found[module, name] = parameter.requires_grad
        found.update({(module, TRAINING): module.training for module in self.every_module()})
        return tuple((module, name, value) for (module, name), value in found.items())

    def every_module(self) -> dict[nn.Module, None]:
        """Return its modules and their submodules, each once."""
        return dict.fromkeys(module for outer in self.modules for module in outer.modules())

    def buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Yield every buffer as (its module, its name there, tensor), each module once."""
        for module in self.every_module():
            yield from ((module, name, b) for name, b in module._buffers.items() if b is not None)

    def buffers_read(self) -> dict[tuple[nn.Module, str], None]:
        """Return (module, name) of the buffers that a run may read: all of a module that is called as a whole."""
        return self._names_read("_buffers")

    def _names_read(self, table: str) -> dict[tuple[nn.Module, str], None]:
        found: dict[tuple[nn.Module, str], None] = {}
        for outer in self.modules:
            read = getattr(outer, "names_read", None)
            found.update(dict.fromkeys(names_in(outer, table) if read is None else read(table)))
        return found


class SavedKind(Enum):
    """Who owns the bytes of a tensor that autograd saves for a stage's backward."""

    OWN = "own"  # the stage: part of its ā, can be dropped, moved and made again
    INPUT = "input"  # the stage's input, of which it is a view: charged there
    RESIDENT = "resident"  # existed before the stage ran (parameters, masks): never counted, never moved
    KEPT = "kept"  # a skip connection that is kept in place: counted once for the step, never moved


@dataclass(frozen=True)
class Behaviour:
    """What a measured run of a stage showed, beyond costs.

    saved: the kind of each saved tensor, in the order of saving.
    own_outputs: for each output tensor, whether the stage made its bytes (else it is a mask passed on, a table).
    changed_buffers: (module, name) of each buffer that the forward changes, or reads and another stage changes.
    changed_attributes: (module, name, bytes) of other attributes of its modules that it sets, such as counters, and of
        containers and generators that it changes.
    draws: whether it draws random numbers. modes: of `StageModule`.
    unmanaged_bytes: held by its graph past all hooks. cast_bytes: held by autocast's cache of its weights.
    overwritten_bytes: of the batch, if the stage changes it in place; a step keeps a copy for replays.
    early_stop: the number of saved tensors after which a replay for its backward alone may stop; 0: it runs to its end.
    forms: the recipe of each smaller form of ``F_sel``, in the order of the chain's `Stage.forms`.
    kept: the outputs in skip connections that are kept in place; a replay returns those of the first run.
    copied: the inputs whose gradients are copied if they are parts of larger storages.
    varying: whether the saved tensors depend on data, so that `saved` holds for the measured run alone.
    for_nothing: the positions in `saved` whose graph is gone when the stage ends.
    """

    saved: tuple[SavedKind, ...]
    own_outputs: tuple[bool, ...] = ()
    changed_buffers: tuple[tuple[nn.Module, str], ...] = ()
    draws: bool = False
    unmanaged_bytes: int = 0
    early_stop: int = 0
    forms: tuple[Recipe, ...] = ()
    kept: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    varying: bool = False
    changed_attributes: tuple[tuple[nn.Module, str, int], ...] = ()
    cast_bytes: int = 0
    modes: tuple[tuple[nn.Module, str, bool], ...] = ()
    for_nothing: frozenset[int] = frozenset()
    overwritten_bytes: int = 0

    @cached_property
    def staying(self) -> dict[int, SavedKind]:
        """The saved tensors that stay where they are, by position, although they are no views of an input."""
        return {n: kind for n, kind in enumerate(self.saved) if kind in (SavedKind.RESIDENT, SavedKind.KEPT)}

    @cached_property
    def own_saved(self) -> list[bool]:
        """For each saved tensor, whether it is the stage's own."""
        return [kind is SavedKind.OWN for kind in self.saved]


def users_of_parameters(stages: Iterable[StageModule]) -> dict[nn.Parameter, list[int]]:
    """Return the parameters that several stages use, with the numbers of those from 1 on. Autograd holds the gradient
    of each from its first part to its last."""
    users: dict[nn.Parameter, list[int]] = {}
    for i, stage in enumerate(stages, start=1):
        for parameter in stage.parameters():
            users.setdefault(parameter, []).append(i)
    return {parameter: by for parameter, by in users.items() if len(by) > 1}
