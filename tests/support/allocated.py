"""Bytes really allocated while something runs: by the profiler's memory events, by a count of the storages alive, and by
one after every operation."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 30.0  # seconds, so that no test depends on what else the machine does


def peak_bytes(run: Callable[[], object], before: Callable[[], object] = bool) -> int:
    """The most bytes that the CPU allocator held during `run`, above the start. before: is called first; what it makes
    and frees counts, too, but not its peak."""
    with profile(use_cpu=True, profile_memory=True) as profiler:
        before()
        with record_function("run"):
            pass
        run()
    began = max(e.start_ns() for e in profiler.kineto_results.events() if e.name() == "run")
    level = most = 0
    held: dict[int, int] = {}
    for at, address, size in sorted(_memory_events(profiler), key=lambda event: event[0]):
        if size < 0 and held.pop(address, None) is None:
            continue  # of a block from before, whose size the profiler may know from an earlier run
        most = max(most, level) if at >= began else 0
        level += size
        held |= {address: size} if size > 0 else {}
    return max(most, level)


def _memory_events(profiler: profile) -> Iterator[tuple[int, int, int]]:
    """Time, address and bytes of each allocation; negative bytes of each release."""
    todo = list(profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def live_bytes() -> int:
    """Bytes of all storages that some Python tensor keeps alive."""
    while gc.collect():  # what a finalizer lets go may be garbage only in the next round
        pass
    found = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def left_bytes(run: Callable[[], object]) -> int:
    """Bytes of storages that operations of `run` made and that are still there `PATIENCE` seconds after it, but for
    gradients of parameters: a copy that still runs in a link's thread keeps its own."""
    with _Made() as made:
        run()
        torch.ones((), requires_grad=True).backward()  # autograd's queue keeps what a failed backward left in it
        gc.collect()
    end = time.monotonic() + PATIENCE
    while (left := made.alive_but_gradients()) and time.monotonic() < end:
        time.sleep(0.001)
    return left


class _Made(TorchDispatchMode):
    """The storages that operations make within."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def alive(self) -> dict[int, int]:
        """Bytes of those that are still there, by storage."""
        self._held = {key: one for key, one in self._held.items() if not one[0].expired()}
        return {key: nbytes for key, (_, nbytes) in self._held.items()}

    def alive_but_gradients(self) -> int:
        """Bytes of those, but for gradients of parameters."""
        parameters = [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter]
        kept = {p.grad.untyped_storage()._cdata for p in parameters if p.grad is not None}
        return sum(nbytes for key, nbytes in self.alive().items() if key not in kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.alive()
        for t in tree_leaves(result):
            if not isinstance(t, torch.Tensor) or t.is_meta:
                continue
            if (storage := t.untyped_storage())._cdata not in given:
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result


def in_file() -> Callable[[torch.Tensor], bool]:
    """Tells whether a tensor lies over the pages of a file, by the kernel's account of this process."""
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    shared = [tuple(int(end, 16) for end in row[0].split("-")) for row in rows if row[1].endswith("s") and len(row) > 5]
    return lambda t: any(first <= t.data_ptr() < last for first, last in shared)


def own_again(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Whatever lies in memory of the process's own lies in new memory now, and so do buffers."""
    away = in_file()
    for module in model.modules():
        module._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    for p in model.parameters():
        if not away(p):
            p.data = p.data.clone()
        if p.grad is not None and not away(p.grad):
            p.grad = p.grad.clone()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, t in state.items():
                if isinstance(t, torch.Tensor) and not away(t):
                    state[key] = t.clone()
