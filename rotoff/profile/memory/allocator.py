"""Logs what the allocator does while code runs, including temporaries inside kernels.

The log comes from the profiler's memory events. They report every allocation and release of PyTorch's CPU and CUDA
allocators, in bytes as the allocator counts them, and leave the user's memory statistics alone. A dispatch mode would
miss temporaries inside kernels.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function

from ...accelerator import ENLARGING, UNSPLIT, allocator_options, block_bytes, events_are_of, is_accelerator
from ...errors import MeasureError
from ...tensors.storage import local, rounded

logger = logging.getLogger("rotoff")
T = TypeVar("T")
_MARK = "rotoff::mark "
_WHOLE = "rotoff::record"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One event: `size` bytes allocated at address `ptr` (negative: freed), or, with size 0, a mark named `mark`."""

    ptr: int
    size: int
    mark: str = ""


@dataclass(frozen=True)
class AllocationLog:
    """Events in order of time.

    Attributes:
        drew: whether random numbers were drawn, if that is known; an allocator does not see it.
    """

    events: tuple[Allocation, ...]
    drew: bool = False

    def live(self) -> dict[int, int]:
        """Return the bytes at each address that is allocated at the end."""
        alive: dict[int, int] = {}
        for event in self.events:
            if event.size > 0:
                alive[event.ptr] = event.size
            elif event.size < 0:
                alive.pop(event.ptr, None)
        return alive

    def taken(self) -> set[int]:
        """Return the addresses that were allocated, whether or not they were freed."""
        return {event.ptr for event in self.events if event.size > 0}

    def level(self) -> int:
        """Return the bytes held at the end, above those at the start."""
        return sum(event.size for event in self.events)

    def before(self, name: str) -> AllocationLog:
        """Return the events before the mark named `name`."""
        at = next(n for n, event in enumerate(self.events) if event.mark == name)
        return AllocationLog(self.events[:at])

    def after(self, name: str) -> AllocationLog:
        """Return the events after the mark named `name`."""
        at = next(n for n, event in enumerate(self.events) if event.mark == name)
        return AllocationLog(self.events[at + 1 :])

    def without_release(self, addresses: Collection[int]) -> AllocationLog:
        """Return the events as if the blocks at `addresses`, allocated before, were not freed."""
        staying = set(addresses)
        kept = []
        for event in self.events:
            if event.size < 0 and event.ptr in staying:
                staying.remove(event.ptr)  # later events at this address belong to another block
            else:
                kept.append(event)
        return AllocationLog(tuple(kept), self.drew)

    def releasing_less(self, nbytes: Mapping[int, int]) -> AllocationLog:
        """Return the events as if the blocks at these addresses, allocated before, were so many bytes smaller."""
        left = dict(nbytes)
        events = [replace(e, size=e.size + left.pop(e.ptr, 0)) if e.size < 0 else e for e in self.events]
        return replace(self, events=tuple(events))

    def by_itself(self) -> AllocationLog:
        """Return the events without releases of earlier blocks, such as what a module left in an attribute in its last
        run."""
        taken: set[int] = set()
        kept = []
        for event in self.events:
            if event.size < 0 and event.ptr not in taken:
                continue
            (taken.discard if event.size < 0 else taken.add)(event.ptr)
            kept.append(event)
        return AllocationLog(tuple(kept), self.drew)

    def sized(self, sizes: Mapping[int, int]) -> AllocationLog:
        """Return the events as if blocks alive at the end had these `sizes` (by address), if they are at most `UNSPLIT`
        larger."""
        left, events = dict(sizes), []
        for event in reversed(self.events):
            size = left.pop(event.ptr, None) if event.size else None
            if size is not None and 0 < event.size - size <= UNSPLIT:
                event = replace(event, size=size)
            events.append(event)
        return replace(self, events=tuple(reversed(events)))

    def peak(self) -> int:
        """Return the most bytes held at once, above those at the start.

        Releases of blocks allocated before the log began are not counted: log their allocation, then look `after` a
        mark.
        """
        return max(accumulate((event.size for event in self.events), initial=0))


class Allocator(Protocol):
    """Sees bytes: those of a device's allocator, or none in `fake.FakeAllocator`."""

    def log(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        """Call `run` and log its allocations."""

    def mark(self, name: str) -> None:
        """Leave a mark in the current log."""

    def address(self, tensor: torch.Tensor) -> int:
        """Return what identifies the storage of `tensor` in a log."""

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that the allocator takes for `nbytes`."""

    def as_requested(self, log: AllocationLog, tensors: Sequence[torch.Tensor]) -> AllocationLog:
        """Return `log` as if the storages of `tensors`, alive at its end, had blocks of the requested size."""


_checked: set[torch.device] = set()  # devices whose allocators report their events


class DeviceAllocator:
    """The allocator of a device.

    Raises:
        MeasureError: if it is a CUDA allocator that reports no events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if is_accelerator(device) and device not in _checked:
            _, log = record(lambda: torch.empty(1, device=device), device)
            if not log.events:
                raise MeasureError(
                    f"the allocator of {device} reports no events, so no bytes can be measured; use PyTorch's own"
                    " (no backend:cudaMallocAsync in PYTORCH_ALLOC_CONF, no PYTORCH_NO_CUDA_MEMORY_CACHING)"
                )
            _checked.add(device)
            _warn_of_larger_blocks()

    def log(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        return record(run, self._device)

    def mark(self, name: str) -> None:
        mark(name)

    def address(self, tensor: torch.Tensor) -> int:
        try:
            return local(tensor).untyped_storage().data_ptr()
        except RuntimeError as error:
            plain = type(tensor) is torch.Tensor
            what = "tensor that torch.func has wrapped (jvp)" if plain else type(tensor).__name__
            cure = "do that in the training loop, outside of the planned model" if plain else "use plain tensors"
            raise MeasureError(f"the model uses a {what}, whose bytes rotoff cannot see; {cure}") from error

    def rounded(self, nbytes: int) -> int:
        return rounded(nbytes, block_bytes(self._device))

    def as_requested(self, log: AllocationLog, tensors: Sequence[torch.Tensor]) -> AllocationLog:
        if not is_accelerator(self._device):
            return log
        return log.sized({self.address(t): self.rounded(t.untyped_storage().nbytes()) for t in tensors})


def _warn_of_larger_blocks() -> None:
    """Warn if the allocator is configured to allocate blocks larger than rotoff counts."""
    if found := [option for option in ENLARGING if option in allocator_options()]:
        logger.warning(
            "rotoff: the allocator's option %s makes blocks larger than rotoff counts, so steps may exceed their limit;"
            " leave it out of PYTORCH_ALLOC_CONF, or lower the limit by what docs/runtime.md says",
            " and ".join(found),
        )


def mark(name: str) -> None:
    """Leave a mark named `name` in the current log."""
    with record_function(_MARK + name):
        pass


def record(run: Callable[[], T], device: torch.device) -> tuple[T, AllocationLog]:
    """Call `run` and log the allocator of `device`. Garbage collection is off meanwhile: it would free what earlier
    code left in reference cycles, and the log would show too few bytes.

    Raises:
        MeasureError: if a profiler is already active, since there can be only one.
    """
    if torch.autograd._profiler_enabled():
        raise MeasureError("cannot measure while a profiler is active; measure before starting the profiler")
    quiet = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"  # otherwise it prints two lines in each run
    try:
        # The profiler drops events outside of all operations, such as frees at the end of a Python frame.
        with without_gc(), profile(profile_memory=True, use_cpu=True) as profiler, record_function(_WHOLE):
            result = run()
        assert profiler.kineto_results is not None
        roots = profiler.kineto_results.experimental_event_tree()
    finally:
        if quiet is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = quiet
    found = sorted(_walk(roots, device), key=lambda pair: pair[0])
    return result, AllocationLog(tuple(event for _, event in found))


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch automatic garbage collection off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _walk(roots: Iterable[Any], device: torch.device) -> Iterable[tuple[int, Allocation]]:
    todo = list(roots)
    while todo:
        node = todo.pop()
        todo.extend(node.children)
        tag = node.tag  # reading a field is slow
        if tag == _EventType.Allocation:
            fields = node.extra_fields
            if events_are_of(fields.device.type, device) and (
                device.index is None or fields.device.index in (device.index, -1)
            ):
                yield node.start_time_ns, Allocation(fields.ptr, fields.alloc_size)
        elif tag == _EventType.TorchOp and (name := node.name).startswith(_MARK):
            yield node.start_time_ns, Allocation(0, 0, name[len(_MARK) :])
