"""Bytes really allocated while something runs, by means that rotoff does not use: the profiler's flat list of memory
events, a count of the storages alive, and one after every operation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the CPU allocator held during `run`, above the start."""
    with profile(use_cpu=True, profile_memory=True) as profiler:
        run()
    events = profiler.kineto_results.events()
    level = most = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        level += size
        most = max(most, level)
    return most


def live_bytes() -> int:
    """Bytes of all storages that some Python tensor keeps alive."""
    while gc.collect():  # what a finalizer lets go may be garbage only in the next round
        pass
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def left_bytes(run: Callable[[], object]) -> int:
    """Bytes that the CPU allocator holds after `run` beyond those before it; negative where it gave some back."""
    every = _ExperimentalConfig(profile_all_threads=True)  # a link's thread may be the last to let go
    with profile(use_cpu=True, profile_memory=True, experimental_config=every) as profiler:
        run()
        gc.collect()
    return sum(e.nbytes() for e in profiler.kineto_results.events() if e.name() == "[memory]")


def most_held(run: Callable[[], object]) -> int:
    """The most bytes of storages made in `run` that were alive after one of its operations; goes with profilers in
    `run`."""
    held: dict[int, tuple[StorageWeakRef, int]] = {}
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            result = func(*args, **(kwargs or {}))
            for key in [key for key, (storage, _) in held.items() if storage.expired()]:
                del held[key]
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and (storage := t.untyped_storage())._cdata not in given:
                    held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            most = max(most, sum(nbytes for _, nbytes in held.values()))
            return result

    with Watch():
        run()
    return most
