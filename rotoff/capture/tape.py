"""The operations of one forward, in order: what `recording` writes, `cuts` divides and `segment` runs again.

A *variable* is a tensor that an operation made or that came with the batch. Arguments of operations are the very Python
values that the forward passed, with `Ref` and `Owned` in place of variables and of the model's parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..tensors.autocast import Autocast


class Ref(NamedTuple):
    """In an argument: the variable of that number."""

    variable: int


class Owned(NamedTuple):
    """In an argument: a parameter or buffer, looked up in its module whenever it is used."""

    module: nn.Module
    table: str  # "_parameters" or "_buffers"
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.table)[self.name]


class Pinned:
    """In an argument: a copy of this tensor, whatever the values are that a run goes by. It waits on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.device = tensor.detach().to("cpu", copy=True), tensor.device


class Variable(NamedTuple):
    """storage: number of its storage, equal for tensors that share bytes; None where a parameter's or constant's bytes
    are its own. nbytes: of that storage. owners: the parameters and buffers that lie there. sharded: it is
    a DTensor, which no stage hands on."""

    storage: int | None
    nbytes: int
    needs_grad: bool
    owners: tuple[Owned, ...] = ()
    sharded: bool = False


NOTHING = object()  # no value is expected


@dataclass(frozen=True)
class Operation:
    """One call of a function of torch, of a custom autograd Function, or of a module taken as a whole.

    outputs: the variable of each tensor that it returns, None for parameters and buffers. reads: variables among the
    arguments. writes: storages that it changes in place. writes_owned: parameters and buffers that it changes. draws:
    whether it draws random numbers. grad: whether gradients were on. autocast: (device type, enabled, dtype) where that
    differs from what was set around the model. expected: for a call that turns tensors into a Python value
    (``bool(x.any())``), that value. effect: to be run though nobody uses what it returns. casts: of weights, which
    autocast within the model keeps (`weight_casts`). place: the modules around it, outermost first, each call of a
    module as (name, number of the call). saves: (number, bytes) of the storages of which autograd saves something for
    it. ends: those that are gone by the next one, since Python lets go of them; what autograd saves is not seen to
    stay. keys: what it is known by in other forwards (`places`).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    reads: tuple[int, ...] = ()
    writes: frozenset[int] = frozenset()
    writes_owned: tuple[Owned, ...] = ()
    draws: bool = False
    grad: bool = True
    autocast: Autocast = ()
    expected: Any = NOTHING
    effect: bool = False
    place: tuple[tuple[str, int], ...] = ()
    casts: tuple[Any, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    ends: tuple[int, ...] = ()
    keys: tuple[Hashable, ...] = ()

    @property
    def makes(self) -> bool:
        """Whether it makes or changes tensors, rather than asking about them."""
        return bool(self.outputs or self.writes or self.writes_owned or isinstance(self.function, nn.Module))

    @property
    def name(self) -> str:
        """Of the function, for messages and tables."""
        return name_of(self.function)

    def owned(self) -> Iterator[Owned]:
        """Parameters and buffers among the arguments, and those that it changes through a view."""
        yield from (leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Owned))
        yield from self.writes_owned


def name_of(function: Any) -> str:
    """A function's name; of an attribute that is read or set, the attribute's."""
    if getattr(function, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", "attribute"))
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass
class Tape:
    """The calls of a forward, in order.

    inputs: the variable of each tensor in the batch.
    result, result_spec: the leaves of what the model returns, and their structure.
    attributes: where its modules keep tensors of the graph, if anywhere; result is then what it returns and a list of
        what they hold.
    varying: modules taken whole of which the work depends on data.
    generators: those that calls were given, each in the state in which it was found.
    tables: tensors among the arguments that were there before and are neither parameters nor buffers.
    opaque: those of the modules taken whole whose calls cannot be told apart.
    inner: of an operation (its id) that is a call of a module, the operations that are to be made in its place while it
        is measured.
    entries: of each call of a module (and how many of it came before), the number of operations before it that make or
        change tensors.
    modules: those of the model.
    random: whether a forward makes some of the operations by chance, and others not.
    held: the storages that stay when all that is saved and returned goes, since an attribute of ``ctx``, a closure of a
        hook, an attribute of a module or a global has them.
    changed: those of `tables` that some operation changes, by id.
    changed_bytes: of these, as often as it does: a step copies it before.
    cast_bytes: what autocast within the model keeps to the end of its region (`weight_casts`). unsaved_cast_bytes: of
        that, what autograd does not save. saved_casts: the others.
    """

    inputs: list[int] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    result: list[Any] = field(default_factory=list)
    result_spec: pytree.TreeSpec | None = None
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    varying: frozenset[nn.Module] = frozenset()
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    tables: list[torch.Tensor] = field(default_factory=list)
    inner: dict[int, tuple[Operation, ...]] = field(default_factory=dict)
    opaque: set[nn.Module] = field(default_factory=set)
    entries: dict[tuple[nn.Module | None, int], int] = field(default_factory=dict)
    random: bool = False
    modules: frozenset[nn.Module] = frozenset()
    held: frozenset[int] = frozenset()
    changed: dict[int, torch.Tensor] = field(default_factory=dict)
    changed_bytes: int = 0
    cast_bytes: int = 0
    unsaved_cast_bytes: int = 0
    saved_casts: frozenset[Any] = frozenset()

    def result_variables(self) -> list[int]:
        return [leaf.variable for leaf in self.result if isinstance(leaf, Ref)]

    @property
    def tensor_bytes(self) -> list[int]:
        """Bytes of the storage of each variable, and of each of which autograd saves something."""
        saved = (nbytes for operation in self.operations for _, nbytes in operation.saves)
        return [*(variable.nbytes for variable in self.variables), *saved]


def substitute(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every leaf replaced; tuples, lists, dicts and slices are looked into."""
    if type(value) in (Ref, Owned):
        return change(value)
    if type(value) is tuple:
        return tuple(substitute(v, change) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(substitute(v, change) for v in value))
    if type(value) is list:
        return [substitute(v, change) for v in value]
    if type(value) is dict:
        return {k: substitute(v, change) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(substitute(v, change) for v in (value.start, value.stop, value.step)))
    return change(value)


def leaves(value: Any) -> list[Any]:
    """The leaves of `value`, as `substitute` meets them."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    substitute(value, note)
    return found
