"""Bytes really allocated while something runs, by means that rotoff does not use: the profiler's flat list of memory events,
and a count of the storages alive."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that the CPU allocator held during `run`, above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
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
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True, experimental_config=every
    ) as profiler:
        run()
        gc.collect()
    return sum(e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
