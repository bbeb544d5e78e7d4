"""Fake copies of a model and its sample (shapes without bytes), and what an allocator would do while they run.

A dispatch mode sees the outputs of every operation. A storage exists from the operation that made it until nothing
refers to it, which a weak reference reports. Of temporaries inside kernels, `cpu_temporaries` knows those that matter.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...accelerator import BLOCK
from ...errors import MeasureError
from ...tensors.eager_mode import EagerMode
from ...tensors.storage import pieces, rounded, uses_of
from ...tensors.tree import leaves
from ..allocations import Event
from .collectives import Collective, collective
from .cpu_temporaries import convolution_kernel, temporary_bytes
from .devices import Device
from .fake_kernels import CPU, QUERIES, FakeKernels
from .roofline import seconds_of

T = TypeVar("T")


def fake_copy(thing: T, mode: FakeTensorMode) -> T:
    """Return a copy of a module, or of a structure of tensors, whose tensors are fake ones on the CPU.

    The original's tensors may be on any device, on ``meta``, or fake. Copies share what the originals share.

    Raises:
        MeasureError: if the module cannot be copied, has tensors that are not strided, or parts that keep their own.
    """
    if not isinstance(thing, nn.Module):
        return tree_map(lambda leaf: _fake(leaf, mode, {}) if isinstance(leaf, torch.Tensor) else leaf, thing)
    try:
        with _Copying(mode):
            copied = copy.deepcopy(thing)
        if not all(map(is_fake, (*copied.parameters(), *copied.buffers()))):
            raise MeasureError("a part of the model is scripted or traced and keeps its own tensors")
        return copied
    except MeasureError:
        raise
    except Exception as error:  # a module may hold anything
        raise MeasureError(f"the model cannot be copied to be estimated: {type(error).__name__}: {error}") from error


class _Copying(TorchFunctionMode):
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return _fake(args[0], self._mode, args[1])
        if func is torch.Tensor.clone:  # deepcopy of a parameter clones its data
            return _fake(args[0], self._mode, {})
        return func(*args, **(kwargs or {}))


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) in memo:
        found: torch.Tensor = memo[id(tensor)]
        return found
    if tensor.layout != torch.strided:
        raise MeasureError(f"a tensor of layout {tensor.layout} cannot be estimated; use strided tensors")
    shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    result: torch.Tensor = FakeTensor(mode, shape, CPU)
    if isinstance(tensor, nn.Parameter):
        result = nn.Parameter(result, requires_grad=tensor.requires_grad)
    else:
        result.requires_grad_(tensor.requires_grad)
        if not tensor.is_leaf:  # as what it stands for, it may be changed in place
            result = result.clone()
    memo[id(tensor)] = result
    return result


class FakeLog(EagerMode):
    """While active, logs the storages that operations make and free, as the allocator of `device` does, and adds up the
    seconds of operations.

    told, collectives: what happened so far. seconds: that it took, without rounding. kernels: of convolutions, which
    PyTorch chooses by their sizes.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        _engine_references()  # caches the result now, because it runs a backward, which hooks would see
        self.told: list[Event] = []
        self.collectives: list[Collective] = []
        self.kernels: list[Any] = []
        self._device = device
        self.seconds = Fraction(0)
        self._numbers: dict[int, int] = {}  # key of a live storage -> number that no other storage gets
        self._watches: dict[int, Any] = {}
        self._count = 0

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        self.told.append(Event(0, begins=name))
        yield
        self.told.append(Event(0, ends=name))

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; for one that was not seen being made, a number that no other has."""
        return self._numbers.get(storage._cdata, -storage._cdata)

    def rounded(self, nbytes: int) -> int:
        return nbytes if self._device.capability is None else rounded(nbytes, BLOCK)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUERIES:  # a third of all: autograd asks for each gradient
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        if func is torch.ops.aten.add.Tensor and not kwargs and torch._C._current_graph_task_id() != -1:
            into = _accumulated(args)
            if into is not None:
                self._ran(torch.ops.aten.add_.Tensor, args, kwargs, into)
                return into
        result = func(*args, **kwargs)
        for tensor in _made(func, result):
            for piece in pieces(tensor):
                self.note(piece.untyped_storage())
        if func is torch.ops.aten.convolution.default and self._device.capability is None:
            self.kernels.append(convolution_kernel(*args))
        beyond = temporary_bytes(func, args, result) if self._device.capability is None else 0
        if beyond:
            self.told.append(Event(-beyond, self.hidden(beyond)))
        self._ran(func, args, kwargs, result)
        return result

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        call = collective(func, args, kwargs, result, self._device, len(self.told))
        seconds = seconds_of(self._device, func, args, kwargs, result) if call is None else call.seconds
        self.collectives += [] if call is None else [call]
        self.seconds += Fraction(0.0 if call is not None and call.beside else seconds)

    def hidden(self, size: int) -> int:
        """Note an allocation that is no output, and return its number."""
        self._count += 1
        self.told.append(Event(size, self._count))
        return self._count

    def note(self, storage: torch.UntypedStorage) -> None:
        """Note a storage, and later its end."""
        key, size = storage._cdata, self.rounded(storage.nbytes())
        if key in self._numbers or size == 0:
            return
        number = self._numbers[key] = self.hidden(size)

        def freed(_: Any) -> None:
            del self._numbers[key], self._watches[key]
            self.told.append(Event(-size, number))

        self._watches[key] = weakref.ref(storage, freed)

    @contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """Within, also see storages that are emptied and filled again, which no operation does."""
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            resized = plain(storage, size)
            if (watch := self._watches.get(storage._cdata)) is not None:
                watch.__callback__(watch)
            self.note(storage)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


def _made(func: Any, result: Any) -> Iterator[torch.Tensor]:
    """Yield the outputs of an operation that are not views of its inputs."""
    returns = func._schema.returns
    if not returns:
        return
    outputs = result if isinstance(result, (tuple, list)) and len(returns) > 1 else (result,)
    for returned, output in zip(returns, outputs, strict=True):
        if returned.alias_info is None:
            yield from (leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor))


def _accumulated(args: Any) -> torch.Tensor | None:
    """Return the gradient that autograd's engine would overwrite if real tensors were added; None if this is no such
    sum.

    The engine overwrites a gradient that nothing else holds, except for a subclass of Tensor, so here it asks for a new
    sum. The engine's call has fewer references than one from a backward written in Python, which tells them apart.
    """
    if torch.is_grad_enabled() or len(args) != 2:
        return None
    alone = _engine_references()
    for place in (0, 1):
        if isinstance(args[place], FakeTensor) and all(
            a <= b for a, b in zip(_references(args, place), alone, strict=True)
        ):
            tensor: torch.Tensor = args[place]
            if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
                return tensor
    return None


def _references(args: Any, place: int) -> tuple[int, int, int]:
    tensor = args[place]
    return tensor._use_count(), uses_of(tensor), sys.getrefcount(tensor)


@functools.cache
def _engine_references() -> tuple[int, int, int]:
    """Return the references to a gradient that the engine is about to add to and that nothing else holds."""
    seen: list[tuple[int, int, int]] = []

    class Watch(EagerMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                seen.append(_references(args, 0))
            return func(*args, **(kwargs or {}))

    with FakeKernels(), torch.enable_grad():
        x = torch.empty(2, requires_grad=True, device=CPU)
        y = torch.stack([x.tanh().sin() * 2, x.cos().sin() * 2])
        with Watch():
            torch.autograd.grad(y, x, torch.empty_like(y))
    return seen[0]
