"""Logs the operations of a stage's forward, as the dispatcher sees them below autograd.

Each storage gets a number when it is first met; views are not operations. Weak references watch the storages, so that
recording keeps nothing alive and a reused address is not taken for the same storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..accelerator import finish
from ..tensors.autocast import uncached_autocast
from ..tensors.clock import mark, seconds_between
from ..tensors.eager_mode import EagerMode
from ..tensors.recipe import QUERIES
from ..tensors.rng import Generators
from ..tensors.saved_tensors import watch_saved
from ..tensors.storage import View
from ..tensors.tree import tensor_leaves


class Leaf(NamedTuple):
    """One item that an operation returns.

    Attributes:
        storage: its number; None if it is not a tensor.
        view: how the tensor lies in it.
        device: of the tensor.
        argument: the position among the arguments, if the operation returns an argument itself.
        constant: the value of an item that is not a tensor.
    """

    storage: int | None
    view: View | None = None
    device: torch.device | None = None
    argument: int | None = None
    constant: Any = None


@dataclass(frozen=True)
class Operation:
    """One dispatched operation.

    Attributes:
        func: the overload.
        reads, writes: numbers of the storages of its tensor arguments, and of those that it changes.
        leaves: what it returns, flat.
        single: whether it returns one tensor instead of a tuple.
        draws: whether it drew random numbers.
        seconds: its duration.
    """

    func: torch._ops.OpOverload
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    single: bool
    draws: bool
    seconds: float

    @property
    def name(self) -> str:
        """The name that PyTorch prints, without namespace and overload, such as ``addmm``."""
        return self.func._schema.name.split("::")[-1]


class Pack(NamedTuple):
    """A tensor that autograd saved.

    Attributes:
        before: the number of operations run before.
        storage: None if no operation had met it.
    """

    before: int
    storage: int | None
    view: View
    shape: torch.Size


@dataclass(frozen=True)
class OperationLog:
    """The operations of a stage's forward.

    Attributes:
        nbytes: of each storage, by number.
        made: position of the operation that made each storage; others existed before.
        outputs: numbers of the storages of the stage's outputs.
    """

    operations: tuple[Operation, ...]
    packs: tuple[Pack, ...]
    nbytes: tuple[int, ...]
    made: dict[int, int]
    outputs: frozenset[int | None]


def record_operations(
    run: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
    seconds: Callable[[Any, Any, Any, Any], float] | None = None,
) -> OperationLog:
    """Call `run`, a stage's forward that returns its outputs, and log its operations and what autograd saves.

    Autocast's cache is off, as in a redo: its contents depend on what ran before.

    Args:
        seconds: returns the seconds of an operation, given its arguments and its result, instead of a clock. Tensors
            are then fake, and every operation that may draw random numbers counts as drawing.
    """
    recorder = _Recorder(device) if seconds is None else _FakeRecorder(device, seconds)
    with uncached_autocast(), watch_saved(recorder.pack), recorder:
        outputs = run()
    numbers = frozenset(recorder.known(t) for t in outputs)
    return OperationLog(recorder.timed(), tuple(recorder.packs), tuple(recorder.nbytes), recorder.made, numbers)


class _Recorder(EagerMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.packs: list[Pack] = []
        self.nbytes: list[int] = []
        self.made: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._watched: list[StorageWeakRef] = []  # while one exists, its address is not reused
        self._spans: list[tuple[Any, Any]] = []  # marks before and after each operation
        self._generators = Generators(device)
        self._device = device

    def timed(self) -> tuple[Operation, ...]:
        """Return the operations with their seconds, once the device has run all of them."""
        finish(self._device)
        spans = zip(self.operations, self._spans, strict=True)
        return tuple(replace(one, seconds=seconds_between(*span)) for one, span in spans)

    def known(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def pack(self, tensor: torch.Tensor) -> None:
        self.packs.append(Pack(len(self.operations), self.known(tensor), View.of(tensor), tensor.shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func in QUERIES:
            return func(*args, **kwargs)
        given = tensor_leaves((args, kwargs))
        reads = tuple(self._number(t)[0] for t in given)
        result, seconds, draws = self._run(func, args, kwargs)
        items = result if isinstance(result, (tuple, list)) else [result]
        returned = tuple(self._leaf(leaf, given) for leaf in items)
        writes = tuple(dict.fromkeys(self._number(t)[0] for t in _written(func, args, kwargs)))
        single = isinstance(result, torch.Tensor)
        self.operations.append(Operation(func, tuple(dict.fromkeys(reads)), writes, returned, single, draws, seconds))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, bool]:
        """Return the operation's result, its seconds if they are known, and whether it drew random numbers."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        before = self._generators.states() if random else ()
        start = mark(self._device)
        result = func(*args, **kwargs)
        self._spans.append((start, mark(self._device)))
        return result, 0.0, random and self._generators.states() is not before

    def _leaf(self, leaf: Any, given: list[torch.Tensor]) -> Leaf:
        if not isinstance(leaf, torch.Tensor):
            return Leaf(None, constant=leaf)
        number, new = self._number(leaf)
        if new:
            self.made[number] = len(self.operations)
        place = next((n for n, t in enumerate(given) if t is leaf), None)
        return Leaf(number, View.of(leaf), leaf.device, place)

    def _number(self, tensor: torch.Tensor) -> tuple[int, bool]:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is not None:
            return number, False
        number = self._numbers[storage._cdata] = len(self.nbytes)
        self.nbytes.append(storage.nbytes())
        self._watched.append(StorageWeakRef(storage))
        return number, True


class _FakeRecorder(_Recorder):
    """Logs operations on fake tensors, which take no time and draw nothing."""

    def __init__(self, device: torch.device, seconds: Callable[[Any, Any, Any, Any], float]) -> None:
        super().__init__(device)
        self._seconds = seconds

    def timed(self) -> tuple[Operation, ...]:
        return tuple(self.operations)

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, bool]:
        result = func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags and _argument("dropout_p", func, args, kwargs) != 0
        return result, self._seconds(func, args, kwargs, result), random


def _argument(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument `name` of an operation, its default if it is not given; None if there is no such argument."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that the operation's schema says it changes."""
    writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return tensor_leaves([_argument(name, func, args, kwargs) for name in writes])
