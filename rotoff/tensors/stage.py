"""A stage of a model: modules that run one after another, and the value that flows between stages."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Passes a copy of its input on; put before a module that would change the caller's batch in place."""

    def forward(self, value: Any) -> Any:
        tensors, rebuild = flatten(value)
        return rebuild([t.clone() for t in tensors])


def names_in(outer: nn.Module, table: str) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of all "_parameters" or "_buffers" of `outer` and the modules within."""
    for module in outer.modules():
        yield from ((module, name) for name, one in getattr(module, table).items() if one is not None)


@dataclass(frozen=True)
class StageModule:
    """Modules run in order, the output of one being the only argument of the next.

    name: for messages and tables, such as ``"blocks.3"`` or ``"relu..flatten"``. storages: of a recorded model, the
    number of the storage of each output tensor. lives: how long the model itself holds what is made there.
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
        """This stage and the one after it, as one."""
        name = f"{self.name.split('..')[0]}..{following.name.split('..')[-1]}"
        return StageModule(
            name, self.modules + following.modules, following.storages, self.lives.and_then(following.lives)
        )

    @property
    def varying(self) -> bool:
        """Whether what it saves for backward may be another number of tensors, of other sizes, with other data."""
        return any(getattr(module, "varying", False) is True for module in self.modules)

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that need a gradient, each once."""
        found = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(found.values())

    def modes(self) -> tuple[tuple[nn.Module, str, bool], ...]:
        """(module, name, value) of what decides what a run saves and may be switched between a forward and its
        backward: of each parameter whether it needs a gradient, and of each module whether it trains, which has the
        name "training"."""
        found: dict[tuple[nn.Module, str], bool] = {}
        for module, name in self._names_read("_parameters"):
            if (parameter := module._parameters[name]) is not None:
                found[module, name] = parameter.requires_grad
        found.update({(module, TRAINING): module.training for module in self.every_module()})
        return tuple((module, name, value) for (module, name), value in found.items())

    def every_module(self) -> dict[nn.Module, None]:
        """Its modules and those within, each once."""
        return dict.fromkeys(module for outer in self.modules for module in outer.modules())

    def buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Every buffer as (its module, its name there, tensor), each module once."""
        for module in self.every_module():
            yield from ((module, name, b) for name, b in module._buffers.items() if b is not None)

    def buffers_read(self) -> dict[tuple[nn.Module, str], None]:
        """(module, name) of the buffers that a run may read; of a module called as a whole, all."""
        return self._names_read("_buffers")

    def _names_read(self, table: str) -> dict[tuple[nn.Module, str], None]:
        found: dict[tuple[nn.Module, str], None] = {}
        for outer in self.modules:
            read = getattr(outer, "names_read", None)
            found.update(dict.fromkeys(names_in(outer, table) if read is None else read(table)))
        return found


class SavedKind(Enum):
    """Whose bytes a tensor is that autograd saves for a stage's backward."""

    OWN = "own"  # made by the stage: part of its ā, can be dropped, moved and made again
    INPUT = "input"  # a view of the stage's input: charged there, found there when needed
    RESIDENT = "resident"  # was there before the stage ran (parameters, masks): never counted, never moved
    KEPT = "kept"  # lies in a skip connection that is kept in place: counted once for the step, never moved


@dataclass(frozen=True)
class Behaviour:
    """What a measured run of a stage showed, beyond costs.

    saved: the kind of each tensor that autograd saves, in the order of saving. own_outputs: of each output tensor,
    whether the stage made its bytes (else they were there before: a mask handed on, a table). changed_buffers: (module,
    name) of each buffer that the forward changes, or reads and another stage changes. changed_attributes: (module,
    name, bytes) of other values of its modules that it sets, such as counters. draws: whether it draws random numbers.
    unmanaged_bytes: kept by its graph past all hooks. cast_bytes: kept by autocast of its weights. modes: of
    `StageModule`. enough: a replay for its backward alone may end when this many tensors have been saved; 0: it runs to
    its end. forms: how each smaller form of ``F_sel`` is made and redone, in the order of the chain's `Stage.forms`.
    kept: the outputs that lie in skip connections kept in place; a replay hands on those of the first run. copied: the
    inputs whose gradients are copied where they lie in a part of a larger storage. varying: what it saves follows from
    data, and was like that in the measured run alone. for_nothing: those of `saved` whose graph nothing leads to when
    the stage ends.
    """

    saved: tuple[SavedKind, ...]
    own_outputs: tuple[bool, ...] = ()
    changed_buffers: tuple[tuple[nn.Module, str], ...] = ()
    draws: bool = False
    unmanaged_bytes: int = 0
    enough: int = 0
    forms: tuple[Recipe, ...] = ()
    kept: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    varying: bool = False
    changed_attributes: tuple[tuple[nn.Module, str, int], ...] = ()
    cast_bytes: int = 0
    modes: tuple[tuple[nn.Module, str, bool], ...] = ()
    for_nothing: frozenset[int] = frozenset()

    @cached_property
    def own_saved(self) -> list[bool]:
        """Of each tensor that autograd saves, whether it is the stage's own."""
        return [kind is SavedKind.OWN for kind in self.saved]
