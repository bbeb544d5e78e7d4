"""The operations of one forward, in order: `recording` writes them, `cuts` divides them, and `segment` runs them.

A *variable* is a tensor that an operation made or that belongs to the batch. The arguments of an operation are the
Python values that the forward passed, with `Ref` and `Owned` in place of variables and of the model's parameters and
buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..tensors.autocast import Autocast
from ..tensors.kernel_flags import KernelFlags


class Ref(NamedTuple):
    """In an argument, stands for the variable of that number."""

    variable: int


class Owned(NamedTuple):
    """In an argument, stands for a parameter or buffer, which is looked up in its module at each use."""

    module: nn.Module
    table: str  # "_parameters" or "_buffers"
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.table)[self.name]


class Pinned:
    """In an argument, stands for a copy of the recorded tensor, whatever a run computes. It is kept on the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.device = tensor.detach().to("cpu", copy=True), tensor.device


class Variable(NamedTuple):
    """A tensor of the tape.

    Attributes:
        storage: number of its storage, equal for tensors that share bytes; None if the storage belongs to a parameter
            or a constant.
        nbytes: of that storage.
        owners: the parameters and buffers in that storage.
        sharded: whether it is a DTensor, which no stage passes on.
    """

    storage: int | None
    nbytes: int
    needs_grad: bool
    owners: tuple[Owned, ...] = ()
    sharded: bool = False


NOTHING = object()  # in place of an expected value


# what `x.requires_grad = True` calls: recorded as the method `requires_grad_`. It must return None, since torch never
# releases what a setter returns.
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Settings(TypedDict):
    """The fields of a `RecordedCall` that say what is set around it."""

    grad: bool
    autocast: Autocast
    kernels: KernelFlags


@dataclass(frozen=True)
class RecordedCall:
    """One call of a function of torch, of a custom autograd Function, or of a module that is called as a whole.

    Attributes:
        outputs: the variable of each returned tensor; None for parameters and buffers.
        reads: variables among the arguments.
        writes: storages that it changes in place.
        writes_owned: parameters and buffers that it changes.
        draws: whether it draws random numbers.
        grad: whether gradients were on.
        autocast: (device type, enabled, dtype), if that differs from the setting around the model.
        kernels: the flags that choose kernels, if they differ from those around the model.
        expected: the Python value that a call such as ``bool(x.any())`` returned.
        effect: whether it must run even if its result is not used.
        place: the calls of modules around it, outermost first, each as (name, number of the call).
        casts: of weights, which autocast keeps (`weight_casts`), one for each use.
        saves: (number, bytes) of the storages that autograd saves for it.
        ends: storages freed before the next operation, because Python releases them; saved tensors do not count as
            holders.
        keys: identify the operation in other forwards (`places`).
        beside: how many of the outputs, the last ones, a module does not return but leaves in attributes.
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
    kernels: KernelFlags = ()
    expected: Any = NOTHING
    effect: bool = False
    place: tuple[tuple[str, int], ...] = ()
    casts: tuple[Any, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    ends: tuple[int, ...] = ()
    keys: tuple[Hashable, ...] = ()
    beside: int = 0

    @property
    def makes(self) -> bool:
        """Whether it makes or changes tensors, instead of reading a value."""
        return bool(self.outputs or self.writes or self.writes_owned or isinstance(self.function, nn.Module))

    @property
    def made(self) -> list[int]:
        """The variables that it returns."""
        return [n for n in self.outputs if n is not None]

    @property
    def touched(self) -> list[int]:
        """The variables that it reads and returns."""
        return [*self.reads, *self.made]

    @property
    def name(self) -> str:
        """The name of the function, for messages and tables."""
        return name_of(self.function)

    def owned(self) -> Iterator[Owned]:
        """Yield the parameters and buffers among the arguments, and those changed through a view."""
        yield from (leaf for leaf in argument_leaves((self.args, self.kwargs)) if isinstance(leaf, Owned))
        yield from self.writes_owned


def name_of(function: Any) -> str:
    """Return a function's name; for reading or setting an attribute, the attribute's name."""
    if getattr(function, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", "attribute"))
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass
class Tape:
    """The operations of a forward, in order.

    Attributes:
        inputs: the variable of each tensor in the batch.
        result, result_spec: the leaves of what the model returns, and their structure.
        attributes: where modules keep tensors of the graph. If there are any, the result is what the model returns and
            a list of their values.
        varying: modules called as a whole whose work depends on data.
        generators: those that calls received, each with the state before.
        tables: tensors among the arguments that existed before and are neither parameters nor buffers.
        opaque: modules called as a whole whose inner calls are unknown.
        inner: for an operation (by id) that calls a module, the operations that replace it while it is measured.
        entries: for each call of a module, and the number of calls of it before, the number of operations before it
            that make or change tensors.
        modules: those of the model.
        random: whether a forward makes some of the operations at random.
        picks: whether the sizes of some tensors depend on data, such as the rows that a mask selects.
        held: storages that stay when all saved and returned tensors are freed, because an attribute of ``ctx``, a
            hook's closure, a module's attribute or a global holds them.
        changed: those of `tables` that an operation changes, by id.
        changed_bytes: their bytes, counted at each change; a step copies the table before.
        casts, region_ends: `kept` and `ends` of `weight_casts.WeightCasts`. A union has no ends.
        cuts: the positions, among the used operations, after which stages end (`partition.cuts`).
    """

    inputs: list[int] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    operations: list[RecordedCall] = field(default_factory=list)
    result: list[Any] = field(default_factory=list)
    result_spec: pytree.TreeSpec | None = None
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    varying: frozenset[nn.Module] = frozenset()
    generators: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    tables: list[torch.Tensor] = field(default_factory=list)
    inner: dict[int, tuple[RecordedCall, ...]] = field(default_factory=dict)
    opaque: set[nn.Module] = field(default_factory=set)
    entries: dict[tuple[nn.Module | None, int], int] = field(default_factory=dict)
    random: bool = False
    picks: bool = False
    modules: frozenset[nn.Module] = frozenset()
    held: frozenset[int] = frozenset()
    changed: dict[int, torch.Tensor] = field(default_factory=dict)
    changed_bytes: int = 0
    casts: dict[Any, bool] = field(default_factory=dict)
    region_ends: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    def result_variables(self) -> list[int]:
        return [leaf.variable for leaf in self.result if isinstance(leaf, Ref)]

    @property
    def tensor_bytes(self) -> list[int]:
        """Bytes of the storage of each variable, and of each of which autograd saves something."""
        saved = (nbytes for operation in self.operations for _, nbytes in operation.saves)
        return [*(variable.nbytes for variable in self.variables), *saved]


def substitute(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with every leaf replaced; looks into tuples, lists, dicts and slices."""
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


def argument_leaves(value: Any) -> list[Any]:
    """Return the leaves of an argument, in the order of `substitute`."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    substitute(value, note)
    return found
