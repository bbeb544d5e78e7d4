"""Logs what a device's allocator does while code runs, including temporaries inside kernels.

The log comes from the profiler's memory events. They report every allocation and release of PyTorch's CPU and CUDA
allocators, in bytes as the allocator counts them, and leave the user's memory statistics alone. A dispatch mode would
miss temporaries inside kernels.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._profiler import RecordScope, _EventType, _RecordFunctionFast
from torch.autograd.profiler import _enable_profiler, _run_on_profiler_start, profile

from ..accelerator import ENLARGING, allocator_options, events_are_of, is_accelerator
from ..errors import MeasureError

logger = logging.getLogger("rotoff")
T = TypeVar("T")
_MARK = "rotoff::"
_ENGINE = "autograd::engine::evaluate_function"
BACKWARD = "backward"  # of a node begins
_SCOPES = {*RecordScope.__members__.values()} - {RecordScope.USER_SCOPE}
_LEVEL = "KINETO_LOG_LEVEL"
_checked: set[torch.device] = set()  # devices whose allocators report their events


class Event(NamedTuple):
    """size: bytes allocated (negative: freed) at the address ptr; or, with size 0, the begin or the end of a region."""

    size: int
    ptr: int = 0
    begins: str = ""
    ends: str = ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler from printing two lines each time."""
    level = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = "99"
    try:
        yield
    finally:
        if level is None:
            del os.environ[_LEVEL]
        else:
            os.environ[_LEVEL] = level


def region(name: str) -> AbstractContextManager[object]:
    """Within, the log is of the region `name`."""
    return _RecordFunctionFast(_MARK + name)


class Log(profile):
    """Logs the allocators from ``with`` to its end."""

    def __init__(self) -> None:
        super().__init__(profile_memory=True, use_cpu=True)

    def __enter__(self) -> Log:
        with _quiet():
            super().__enter__()
        # Of what an accelerator frees, it logs only what is within an operation or a region; so one is around all.
        self._whole = _RecordFunctionFast("rotoff")
        self._whole.__enter__()
        return self

    def _start_trace(self) -> None:
        """As in PyTorch, but without the caller's regions: one that begins in this log and ends in the next would write
        into memory that the profiler has freed."""
        self.entered = True
        _run_on_profiler_start()
        _enable_profiler(self.config(), self.kineto_activities, _SCOPES)  # type: ignore[call-arg]

    def __exit__(self, *error: Any) -> None:
        self._whole.__exit__(None, None, None)
        with _quiet():
            super().__exit__(*error)

    def events(self, device: torch.device) -> list[Event]:
        """Return what the allocator of `device` did, in order of time."""
        assert self.kineto_results is not None
        with without_gc():  # which would look at the caller's objects again and again
            return events_of(self.kineto_results.experimental_event_tree(), device)


def events_of(roots: Iterable[Any], device: torch.device) -> list[Event]:
    """Return the events of `device` in a profiler's tree."""
    found: list[tuple[int, int, Event]] = []
    todo = list(roots)
    while todo:
        node = todo.pop()
        todo.extend(node.children)
        tag = node.tag  # reading a field is slow
        if tag == _EventType.Allocation:
            told = node.extra_fields
            here = device.index is None or told.device.index in (device.index, -1)
            if here and events_are_of(told.device.type, device):
                found.append((node.start_time_ns, 1, Event(told.alloc_size, told.ptr)))
        elif tag == _EventType.TorchOp and (name := node.name).startswith(_MARK):
            name = name.removeprefix(_MARK)
            found.append((node.start_time_ns, 0, Event(0, begins=name)))
            found.append((node.end_time_ns, 2, Event(0, ends=name)))
        elif tag == _EventType.TorchOp and name.startswith(_ENGINE):
            found.append((node.start_time_ns, 0, Event(0, begins=BACKWARD)))
    return [event for _, _, event in sorted(found, key=lambda one: one[:2])]


def logged(run: Callable[[], T], device: torch.device) -> tuple[T, list[Event]]:
    """Call `run` and log the allocator of `device`. Garbage collection is off meanwhile: it would free what earlier
    code left in reference cycles, and the log would show too few bytes.

    Raises:
        MeasureError: if a profiler is already active, since there can be only one, or if the allocator reports nothing.
    """
    if torch.autograd._profiler_enabled():
        raise MeasureError("cannot measure while a profiler is active; measure before starting the profiler")
    check_allocator(device)
    with without_gc(), Log() as log:
        result = run()
    return result, log.events(device)


def peak_of(events: Iterable[Event]) -> int:
    """Return the most bytes held at once, above those at the start."""
    return max(accumulate((event.size for event in events), initial=0))


def check_allocator(device: torch.device) -> None:
    """Check once that the allocator of `device` reports its events; warn if its options make blocks larger than rotoff
    counts.

    Raises:
        MeasureError: if it reports none.
    """
    if not is_accelerator(device) or device in _checked:
        return
    with Log() as log:
        torch.empty(1, device=device)
    if not any(event.size for event in log.events(device)):
        raise MeasureError(
            f"the allocator of {device} reports no events, so no bytes can be measured; use PyTorch's own"
            " (no backend:cudaMallocAsync in PYTORCH_ALLOC_CONF, no PYTORCH_NO_CUDA_MEMORY_CACHING)"
        )
    _checked.add(device)
    if found := [option for option in ENLARGING if option in allocator_options()]:
        logger.warning(
            "rotoff: the allocator's option %s makes blocks larger than rotoff counts, so steps may exceed their limit;"
            " leave it out of PYTORCH_ALLOC_CONF, or lower the limit by what docs/runtime.md says",
            " and ".join(found),
        )


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
