"""A pytest plugin that lets the tests marked `cuda` run without a GPU, on the stand-in of device.cpp:

    python tests/cuda_standin/standin.py OUT           # builds OUT/libstandin.so; needs a C++ compiler
    PYTHONPATH=tests/cuda_standin STANDIN=OUT/libstandin.so python -m pytest -p standin -m "cuda and not concurrent"
    tests/cuda

It shows that the code for CUDA runs, on tensors that say so, with the right bits and bytes; not how fast, nor that
streams are ordered (`tests/runtime/test_step_order.py` does that). Tests marked `concurrent` need streams that run
beside each other, or memory that is really pinned. To be loaded before anything imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile device.cpp against the torch of this interpreter; returns the library. About half a minute."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library = folder / "libstandin.so"
    flags = ["-shared", "-fPIC", "-std=c++20", "-O1", *(f"-I{path}" for path in include_paths())]
    flags += [f"-I{sysconfig.get_paths()['include']}", *(f"-L{path}" for path in library_paths())]
    links = ["-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run(["c++", *flags, str(HERE / "device.cpp"), "-o", str(library), *links], check=True)
    return library


class Stream:
    """A queue whose work is done when the call that issues it returns."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """The host's time at which it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._timed and end._timed, "an event without timing has no time"
        assert self._time is not None and end._time is not None, "the event was not recorded"
        return (end._time - self._time) * 1e3


def stand_in(library: str) -> None:
    """Load the device and have `torch.cuda` speak of it."""
    folder = next(Path(path) / "torch" / "lib" for path in sys.path if (Path(path) / "torch" / "lib").is_dir())
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    counts = ("allocated", "requested", "reserved")
    for name in (*counts, *(f"{count}_peak" for count in (*counts, "large")), "capacity"):
        getattr(device, f"standin_{name}").restype = ctypes.c_int64
    import torch

    default, streams = Stream(), threading.local()

    def current() -> list[Stream]:
        if not hasattr(streams, "entered"):
            streams.entered = [default]
        return streams.entered

    @contextlib.contextmanager
    def enter(stream: Stream | None) -> Iterator[None]:
        current().append(stream or current()[-1])
        try:
            yield
        finally:
            current().pop()

    def statistics(_: Any = None) -> dict[str, int]:
        held, most = device.standin_allocated(), device.standin_allocated_peak()
        found = {"allocation.large_pool.peak": device.standin_large_peak(), "num_alloc_retries": 0, "num_ooms": 0}
        found |= {"reserved_bytes.all.current": device.standin_reserved()}
        found |= {"reserved_bytes.all.peak": device.standin_reserved_peak()}
        for kind in ("allocated", "active"):
            found |= {f"{kind}_bytes.all.current": held, f"{kind}_bytes.all.peak": most}
        asked = {"current": device.standin_requested(), "peak": device.standin_requested_peak()}
        return found | {f"requested_bytes.all.{when}": nbytes for when, nbytes in asked.items()}

    @contextlib.contextmanager
    def on(where: Any) -> Iterator[None]:
        before = device.standin_exchange(index(where))
        try:
            yield
        finally:
            device.standin_exchange(before)

    def index(where: Any) -> int:
        """Of a device; -1 for the current one."""
        if where is None or isinstance(where, int):
            return -1 if where is None else where
        found = torch.device(where).index
        return -1 if found is None else found

    class Generator:
        """The CPU's, which the stand-in draws from; where its state is set, the dropout of cuDNN's LSTMs begins anew."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.default_generator, name)

        def set_state(self, state: torch.Tensor) -> None:
            torch.default_generator.set_state(state)
            device.standin_fill_anew()

    count = device.standin_count()
    properties = SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=device.standin_capacity())
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    replaced = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: count,
        "current_device": lambda: device.standin_current(),
        "set_device": lambda where: device.standin_exchange(index(where)),
        "device": on,
        "get_device_name": lambda _=None: "stand-in",
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_properties": lambda _=None: properties,
        "Stream": Stream,
        "Event": Event,
        "stream": enter,
        "current_stream": lambda _=None: current()[-1],
        "default_stream": lambda _=None: default,
        "synchronize": lambda _=None: None,
        "mem_get_info": lambda _=None: (
            device.standin_capacity() - device.standin_reserved(),
            device.standin_capacity(),
        ),
        "memory_stats": statistics,
        "memory_stats_as_nested_dict": lambda _=None: {
            "allocated_bytes": {"all": {"current": device.standin_allocated()}},
            "num_alloc_retries": 0,
        },
        "memory_allocated": lambda _=None: device.standin_allocated(),
        "memory_reserved": lambda _=None: device.standin_reserved(),
        "max_memory_allocated": lambda _=None: device.standin_allocated_peak(),
        "max_memory_reserved": lambda _=None: device.standin_reserved_peak(),
        "reset_peak_memory_stats": lambda _=None: device.standin_reset_peak(),
        "empty_cache": lambda: device.standin_empty_cache(),
        "set_per_process_memory_fraction": lambda share, _=None: device.standin_allow(
            ctypes.c_int64(int(share * device.standin_capacity()))
        ),
        "set_sync_debug_mode": lambda mode: device.standin_strict(("default", "warn", "error").index(mode)),
        "_sleep": lambda _: None,
        "cudart": lambda: runtime,
        "default_generators": (Generator(),) * count,
        "manual_seed": lambda _: device.standin_fill_anew(),  # the CPU's is seeded beside it
        "manual_seed_all": lambda _: device.standin_fill_anew(),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: Generator().set_state(state),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    cuda: Any = torch.Tensor
    cuda.cuda = lambda self, where=None, *_, **__: self.to("cuda" if where is None else f"cuda:{index(where)}")
    cuda.pin_memory = lambda self, *_, **__: self
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU has no kernel of that name
    torch.backends.cuda.enable_mem_efficient_sdp(False)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
else:
    stand_in(os.environ["STANDIN"])
