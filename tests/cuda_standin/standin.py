"""A pytest plugin that lets the tests marked `cuda` run without a GPU, on the stand-in of device.cpp:

    python tests/cuda_standin/standin.py OUT           # builds OUT/libstandin.so; needs a C++ compiler
    PYTHONPATH=tests/cuda_standin STANDIN=OUT/libstandin.so python -m pytest -p standin -m "cuda and not concurrent"
    tests/cuda

It shows that the code for CUDA runs, on tensors that say so, with the right bits and bytes, and that it waits where it
must: kernels and copies come late, in an order that STANDIN_SEED changes. It does not show how fast it is; tests marked
`concurrent` need that. STANDIN_REGISTERS=no: the driver refuses to register host memory. To be loaded before anything
imports torch.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import sysconfig
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


def stand_in(library: str) -> None:
    """Load the device and have `torch.cuda` speak of it."""
    folder = next(Path(path) / "torch" / "lib" for path in sys.path if (Path(path) / "torch" / "lib").is_dir())
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    counts = ("allocated", "requested", "reserved")
    for name in ("stream", *counts, *(f"{name}_peak" for name in (*counts, "large")), "capacity"):
        getattr(device, f"standin_{name}").restype = ctypes.c_int64
    import torch

    def stream(where: Any = None, priority: int = 0, **known: Any) -> Any:
        """As torch.cuda.Stream makes it, which a build without CUDA lacks."""
        return torch.Stream(**known or {"device": torch.device("cuda", index(where)), "priority": priority})

    def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        """As torch.cuda.Event makes it."""
        return torch.Event("cuda", enable_timing=enable_timing, blocking=blocking)

    def index(where: Any) -> int:
        """Of a device; the current one's where it has none."""
        where = where if where is None or isinstance(where, int) else torch.device(where).index
        return device.standin_current() if where is None else where

    def init() -> None:
        device.standin_init()
        torch.cuda.default_generators = (default,) * count

    def statistics(_: int) -> dict[str, Any]:
        held, most = device.standin_allocated(), device.standin_allocated_peak()
        asked, asked_most = device.standin_requested(), device.standin_requested_peak()
        figures = {"allocated": (held, most), "active": (held, most), "requested": (asked, asked_most)}
        figures["reserved"] = device.standin_reserved(), device.standin_reserved_peak()
        found = {f"{kind}_bytes": {"all": {"current": now, "peak": peak}} for kind, (now, peak) in figures.items()}
        found["allocation"] = {"large_pool": {"peak": device.standin_large_peak()}}
        return found | {"num_alloc_retries": 0, "num_ooms": 0}

    def free(_: int) -> tuple[int, int]:
        return capacity - device.standin_reserved(), capacity

    count, capacity = device.standin_count(), device.standin_capacity()
    default = torch.Generator("cuda")
    properties = SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=capacity)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, _: device.standin_register(
            ctypes.c_void_p(address), ctypes.c_int64(nbytes)
        ),
        cudaHostUnregister=lambda address: device.standin_unregister(ctypes.c_void_p(address)),
        cudaMemGetInfo=free,
    )
    beneath = {
        "init": init,
        "getDeviceCount": lambda: count,
        "getDevice": lambda: device.standin_current(),
        "setDevice": lambda where: device.standin_exchange(where),
        "getCurrentStream": lambda where: (device.standin_stream(), index(where), 1),
        "getCurrentRawStream": lambda _: device.standin_stream(),
        "getDefaultStream": lambda where: (0, index(where), 1),
        "setStream": lambda stream_id, device_index, device_type: device.standin_set_stream(ctypes.c_int64(stream_id)),
        "synchronize": lambda: device.standin_synchronize(),
        "sleep": lambda _: device.standin_sleep(),
        "memoryStats": statistics,
        "resetPeakMemoryStats": lambda _: device.standin_reset_peak(),
        "emptyCache": lambda: device.standin_empty_cache(),
        "setMemoryFraction": lambda share, _: device.standin_allow(ctypes.c_int64(int(share * capacity))),
        "set_sync_debug_mode": lambda mode: device.standin_strict(mode),
        "isInBadFork": lambda: False,
    }
    for name, value in beneath.items():
        setattr(torch._C, f"_cuda_{name}", value)
    replaced = {
        "_is_compiled": lambda: True,
        "_cudart": runtime,
        "device_count": lambda: count,
        "_exchange_device": lambda where: device.standin_exchange(where),
        "_maybe_exchange_device": lambda where: device.standin_exchange(where),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda _=None: "stand-in",
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_properties": lambda _=None: properties,
        "Stream": stream,
        "Event": event,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)

    def resize(storage: Any, nbytes: int) -> Any:
        """As PyTorch resizes a storage, which a build without CUDA refuses to do for one of CUDA's."""
        if storage.device.type != "cuda" or not storage.resizable():
            return on_cpu(storage, nbytes)
        device.standin_resize(ctypes.c_void_p(storage._cdata), ctypes.c_int64(nbytes))
        return storage

    def clone(storage: Any) -> Any:
        """As PyTorch clones a storage, likewise."""
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)

    on_cpu = torch.UntypedStorage.resize_
    storages: Any = torch.UntypedStorage
    storages.resize_, storages.clone = resize, clone
    cuda: Any = torch.Tensor
    cuda.cuda = lambda self, where=None, *_, **__: self.to("cuda" if where is None else f"cuda:{index(where)}")
    torch.backends.cuda.enable_flash_sdp(False)  # the CPU has no kernel of that name


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
else:
    stand_in(os.environ["STANDIN"])
