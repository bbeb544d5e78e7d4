"""What the allocator did while some code ran, kernels' temporaries included, read from the profiler's memory events.

The profiler reports every allocation and release of PyTorch's CPU and CUDA allocators, in bytes as the allocator counts
them, without touching the user's memory statistics. A dispatch mode would miss the temporaries inside kernels.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function

from ...errors import MeasureError
from ...tensors.storage import block_bytes, local, rounded

logger = logging.getLogger("rotoff")
T = TypeVar("T")
_MARK = "rotoff::mark "
_WHOLE = "rotoff::record"
ENLARGING = ("max_split_size_mb", "roundup_power2_divisions")
UNSPLIT = 1 << 20  # bytes that it leaves with a block above 1 MiB, where that is what there was


@dataclass(frozen=True, slots=True)
class Allocation:
    """One event: `size` bytes taken at address `ptr` (negative: given back), or, with size 0, a mark named `mark`."""

    ptr: int
    size: int
    mark: str = ""


@dataclass(frozen=True)
class AllocationLog:
    """Events in order of time. drew: random numbers were seen to be drawn (the allocator does not see it)."""

    events: tuple[Allocation, ...]
    drew: bool = False

    def live(self) -> dict[int, int]:
        """Bytes at each address that was taken and not given back."""
        alive: dict[int, int] = {}
        for event in self.events:
            if event.size > 0:
                alive[event.ptr] = event.size
            elif event.size < 0:
                alive.pop(event.ptr, None)
        return alive

    def taken(self) -> set[int]:
        """Addresses that were taken, whether or not they were given back."""
        return {event.ptr for event in self.events if event.size > 0}

    def level(self) -> int:
        """Bytes held at the end above the start."""
        return sum(event.size for event in self.events)

    def before(self, name: str) -> AllocationLog:
        at = next(n for n, event in enumerate(self.events) if event.mark == name)
        return AllocationLog(self.events[:at])

    def after(self, name: str) -> AllocationLog:
        """The events after the mark named `name`."""
        at = next(n for n, event in enumerate(self.events) if event.mark == name)
        return AllocationLog(self.events[at + 1 :])

    def without_release(self, addresses: Collection[int]) -> AllocationLog:
        """The events as they would be if the blocks at `addresses`, there before, were not given back."""
        staying = set(addresses)
        kept = []
        for event in self.events:
            if event.size < 0 and event.ptr in staying:
                staying.remove(event.ptr)  # whoever takes that address next gives it back
            else:
                kept.append(event)
        return AllocationLog(tuple(kept), self.drew)

    def by_itself(self) -> AllocationLog:
        """The events without releases of what was there before: what a module left in an attribute in its last run,
        say."""
        taken: set[int] = set()
        kept = []
        for event in self.events:
            if event.size < 0 and event.ptr not in taken:
                continue
            (taken.discard if event.size < 0 else taken.add)(event.ptr)
            kept.append(event)
        return AllocationLog(tuple(kept), self.drew)

    def sized(self, sizes: Mapping[int, int]) -> AllocationLog:
        """The events as they would be if the blocks at these addresses that are alive at the end had these `sizes`,
        where they are larger by no more than `UNSPLIT`."""
        left, events = dict(sizes), []
        for event in reversed(self.events):
            size = left.pop(event.ptr, None) if event.size else None
            if size is not None and 0 < event.size - size <= UNSPLIT:
                event = replace(event, size=size)
            events.append(event)
        return replace(self, events=tuple(reversed(events)))

    def peak(self, shortened: dict[int, str] | None = None) -> int:
        """The most bytes held above the start.

        Blocks taken before the recording began are not seen to go: record their making, then look `after` a mark.

        Args:
            shortened: addresses of blocks alive at the end, each with the mark at which it counts as given back.
        """
        ends: dict[str, int] = {}  # mark -> bytes that it gives back
        alive = self.live()
        for ptr, mark in (shortened or {}).items():
            if ptr in alive:
                ends[mark] = ends.get(mark, 0) + alive[ptr]
        level = most = 0
        for event in self.events:
            level += event.size - (ends.pop(event.mark, 0) if event.mark else 0)
            most = max(most, level)
        return most


class Allocator(Protocol):
    """Where bytes are seen: a device's allocator here, none at all in `fake.FakeAllocator`."""

    def log(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        """Call `run` and log what is allocated meanwhile."""

    def mark(self, name: str) -> None:
        """Leave a mark in the log being recorded."""

    def address(self, tensor: torch.Tensor) -> int:
        """What tells the storage of `tensor` from others in a log."""

    def rounded(self, nbytes: int) -> int:
        """What is taken for `nbytes`."""

    def as_asked(self, log: AllocationLog, tensors: Sequence[torch.Tensor]) -> AllocationLog:
        """`log`, where the storages of `tensors`, alive at its end, take what is taken for their bytes, whatever block
        each got."""


_telling: set[torch.device] = set()  # whose allocators have been seen to tell what they give


class DeviceAllocator:
    """The allocator of a device.

    Raises:
        MeasureError: where it is one on CUDA that does not tell what it gives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda" and device not in _telling:
            _, log = record(lambda: torch.empty(1, device=device), device)
            if not log.events:
                raise MeasureError(
                    f"the allocator of {device} does not tell what it gives, so no bytes can be measured; use PyTorch's"
                    " own one (no backend:cudaMallocAsync in PYTORCH_ALLOC_CONF, no PYTORCH_NO_CUDA_MEMORY_CACHING)"
                )
            _telling.add(device)
            _warn_of_larger_blocks()

    def log(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        return record(run, self._device)

    def mark(self, name: str) -> None:
        mark(name)

    def address(self, tensor: torch.Tensor) -> int:
        try:
            return local(tensor).untyped_storage().data_ptr()
        except RuntimeError as error:
            raise MeasureError(
                f"the model works on a {type(tensor).__name__}, whose bytes rotoff cannot see; use plain tensors"
            ) from error

    def rounded(self, nbytes: int) -> int:
        return rounded(nbytes, block_bytes(self._device))

    def as_asked(self, log: AllocationLog, tensors: Sequence[torch.Tensor]) -> AllocationLog:
        if self._device.type != "cuda":
            return log
        return log.sized({self.address(t): self.rounded(t.untyped_storage().nbytes()) for t in tensors})


def _warn_of_larger_blocks() -> None:
    """Say where the allocator is told to give blocks that are larger than is counted."""
    told = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if found := [option for option in ENLARGING if option in told]:
        logger.warning(
            "rotoff: the allocator's option %s makes blocks larger than rotoff counts, so that steps may exceed their"
            " limit; leave it out of PYTORCH_ALLOC_CONF, or lower the limit by what docs/runtime.md says",
            " and ".join(found),
        )


def mark(name: str) -> None:
    """Leave a mark named `name` in the log being recorded."""
    with record_function(_MARK + name):
        pass


def record(run: Callable[[], T], device: torch.device) -> tuple[T, AllocationLog]:
    """Call `run` and log the allocator of `device` meanwhile. No garbage is collected meanwhile: what earlier code left
    in reference cycles would be given back within the log, which would then show too few bytes.

    Raises:
        MeasureError: where a profiler is active already, since there can be only one.
    """
    if torch.autograd._profiler_enabled():
        raise MeasureError("cannot measure while a profiler is active; measure before starting the profiler")
    quiet = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else it prints two lines a run
    try:
        # The profiler's tree leaves out a device's events that are within no operation: frees as a Python frame ends,
        # say.
        with _uncollected(), profile(profile_memory=True, use_cpu=True) as profiler, record_function(_WHOLE):
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
def _uncollected() -> Iterator[None]:
    """Python's garbage collector does not run by itself within."""
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
        tag = node.tag  # each field of a node is looked up anew
        if tag == _EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == device.type and (
                device.index is None or fields.device.index in (device.index, -1)
            ):
                yield node.start_time_ns, Allocation(fields.ptr, fields.alloc_size)
        elif tag == _EventType.TorchOp and (name := node.name).startswith(_MARK):
            yield node.start_time_ns, Allocation(0, 0, name[len(_MARK) :])
