"""The device on which steps run: streams, events, memory figures, generators, host memory that it may copy from, and
the rules of its allocator.

PyTorch has a module with the same names for each type of device (``torch.get_device_module``). What CUDA alone has is
asked of the CUDA runtime. A type of device is listed in `ACCELERATORS` once the tests ran on it; without one, there is
the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

Stream = Any
Event = Any

ACCELERATORS = ("cuda",)  # types of devices with streams and memory of their own; AMD's are of this type, too
TYPES = ("cpu", *ACCELERATORS)


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has streams and memory of its own; a CPU has neither."""
    return device.type in ACCELERATORS


def named(device: torch.device | str | int) -> torch.device:
    """Return the device of that name, or the accelerator of that number."""
    return torch.device(ACCELERATORS[0], device) if isinstance(device, int) else torch.device(device)


def indexed(device: torch.device) -> torch.device:
    """Return the device with its number: the current one's if it has none."""
    if not is_accelerator(device):
        return device
    return torch.device(device.type, _module(device).current_device() if device.index is None else device.index)


def is_available(device: torch.device) -> bool:
    """Whether this process can use devices of that type."""
    return not is_accelerator(device) or bool(_module(device).is_available())


def described(device: torch.device) -> dict[str, Any]:
    """Return the name of an accelerator, its capability, how many there are, and the version of its software."""
    found = _module(device).get_device_properties(device)
    figures = {
        "device": found.name,
        "capability": [found.major, found.minor],
        "devices": _module(device).device_count(),
    }
    return figures | {"cuda": torch.version.cuda, "allocator": allocator_options()}


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return CUDA's (major, minor); None for a CPU."""
    return tuple(_module(device).get_device_capability(device)) if is_accelerator(device) else None


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the default generator of an accelerator; None for a CPU."""
    if not is_accelerator(device):
        return None
    module = _module(device)
    module.init()  # there are no generators before
    generator: torch.Generator = module.default_generators[indexed(device).index]
    return generator


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


# -- streams and events


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which the calling thread computes."""
    return _module(device).current_stream(device)


def new_stream(device: torch.device, priority: int = 0) -> Stream:
    """Return another stream."""
    return _module(device).Stream(device, priority=priority)


def new_event(device: torch.device, timed: bool) -> Event:
    """Return an event. timed: whether it tells when it passed."""
    return _module(device).Event(enable_timing=timed)


def copy_on(stream: Stream, device: torch.device, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put a copy on `stream` for each (target, source), which are contiguous bytes: torch issues one asynchronous copy
    each, because the driver knows the host side as registered; torch itself does not look."""
    with _module(device).stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)


def finish(device: torch.device) -> None:
    """Block the host until the device has done all that was launched."""
    if is_accelerator(device):
        _module(device).synchronize(device)


def is_capturing() -> bool:
    """Whether a graph of kernels is being captured, whose launches will be repeated without Python."""
    modules = [torch.get_device_module(kind) for kind in ACCELERATORS]
    return any(module.is_initialized() and module.is_current_stream_capturing() for module in modules)


# -- memory


def retries(device: torch.device) -> int:
    """Return how often the allocator found no room, gave all that it did not use back to the device, and tried
    again."""
    return int(_statistics(device).get("num_alloc_retries", 0)) if is_accelerator(device) else 0


def _statistics(device: torch.device) -> dict[str, Any]:
    """Return the allocator's statistics; ``memory_allocated`` would flatten and sort all of them."""
    found: dict[str, Any] = _module(device).memory_stats_as_nested_dict(device)
    return found


def peaks(device: torch.device, run: Callable[[], object]) -> dict[str, int]:
    """Return the peak bytes of `run` above those held before. asked: bytes that tensors requested. given: bytes in the
    allocator's blocks. slack: bytes that its rule for splitting blocks may add to these. reserved: bytes that it took
    from the device, starting with an empty cache. retries: how often it found none and emptied its cache."""
    module = _module(device)
    finish(device)
    empty_cache(device)
    before = module.memory_stats(device)
    module.reset_peak_memory_stats(device)
    run()
    finish(device)
    after = module.memory_stats(device)
    kinds = {"asked": "requested", "given": "allocated", "reserved": "reserved"}
    found = {name: after[f"{k}_bytes.all.peak"] - before[f"{k}_bytes.all.current"] for name, k in kinds.items()}
    retries = after["num_alloc_retries"] - before["num_alloc_retries"]
    return found | {"slack": after["allocation.large_pool.peak"] << 20, "retries": retries}


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return how many bytes an accelerator has free, and in all."""
    free, total = _module(device).mem_get_info(device)
    return int(free), int(total)


def free_bytes(device: torch.device) -> int:
    """Return what an accelerator has free, with what the allocator has reserved and not handed out."""
    module = _module(device)
    return memory_of(device)[0] + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def empty_cache(device: torch.device) -> None:
    """Give what the allocator has reserved and not handed out back to the device."""
    if is_accelerator(device):
        _module(device).empty_cache()


def take_workspaces(device: torch.device) -> None:
    """Have the library of matrix products allocate what it keeps for each thread and stream, in this thread and in
    autograd's."""
    if is_accelerator(device):
        with torch.inference_mode(False), torch.enable_grad():
            factor = torch.ones(8, 8, device=device, requires_grad=True)
            (factor @ factor).sum().backward()


# -- rules of the allocator

BLOCK = 512  # bytes; every request is rounded up to a multiple
SPARE = 1 << 20  # bytes; blocks that are larger are not split where at most this would be left, and count as a whole
OWN_SEGMENT = 10 << 20  # bytes; requests from here on have segments of their own, smaller ones share some of 20 MiB
# Options that make blocks larger than these rules say, or the segments that they come out of.
ENLARGING = ("max_split_size_mb", "roundup_power2_divisions", "large_segment_size_mb")
# What the allocator reserves over what it is asked for, at most, as a share and in bytes (`docs/runtime.md`).
OVER_RESERVED, OVER_RESERVED_EXPANDABLE, OVER_RESERVED_BYTES = 0.45, 0.3, 22 << 20


def block_bytes(device: torch.device) -> int:
    """Return the size in bytes to whose multiples the allocator of `device` rounds."""
    return BLOCK if is_accelerator(device) else 1


def charged(nbytes: int, device: torch.device) -> int:
    """Return the bytes that a plan counts for a block of `nbytes` of the allocator of `device`, which may give a larger
    one: how much larger depends on what else is free, which no plan knows.

    From `OWN_SEGMENT` on, that is the most that it may give. That of smaller ones would charge up to twice their bytes,
    of which steps take a twentieth: of many blocks few are larger. Charged is a share that 4 of 12,799 random chains
    exceeded, by the allocator's rules. Whole pieces of 2 MiB, as sizes that are powers of two, fill its segments, and
    are charged as they are; beside blocks of other sizes one may still be larger.
    """
    filling = nbytes < OWN_SEGMENT and nbytes % (2 * SPARE) == 0
    if not is_accelerator(device) or nbytes <= SPARE or filling or _expandable():
        return nbytes
    return nbytes + (SPARE if nbytes >= OWN_SEGMENT else max(SPARE // 4, nbytes // 16 // BLOCK * BLOCK))


def allocator_options() -> str:
    """Return the options that the environment gives the allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next((os.environ[name] for name in names if name in os.environ), "")


def reservable_bytes(nbytes: int) -> int:
    """Return how many bytes a step may allocate so that the allocator reserves at most `nbytes` for it."""
    over = OVER_RESERVED_EXPANDABLE if _expandable() else OVER_RESERVED
    return max(0, int((nbytes - OVER_RESERVED_BYTES) / (1 + over)))


def _expandable() -> bool:
    """Whether segments grow, whose blocks are split to 512 bytes."""
    return "expandable_segments:true" in allocator_options().lower().replace(" ", "")


def events_are_of(kind: str, device: torch.device) -> bool:
    """Whether the profiler's memory events of devices of type `kind` are those of `device`: some builds for AMD
    report theirs as "hip"."""
    return kind == device.type or (is_accelerator(device) and kind == "hip")


# -- host memory

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process


def register(host: torch.Tensor, device: torch.device) -> int:
    """Lock the pages of `host`, so that the device copies from and to them by itself; returns 0, or the runtime's error
    code."""
    module = _module(device)
    with module.device(device):
        code = int(module.cudart().cudaHostRegister(host.data_ptr(), host.numel(), _PORTABLE))
        if code:
            _clear_last_error(device)
    return code


def unregister(address: int, device: torch.device) -> None:
    """Unlock what `register` has locked at `address`; no copy may be under way."""
    module = _module(device)
    with module.device(device):
        if int(module.cudart().cudaHostUnregister(address)):
            _clear_last_error(device)


def _clear_last_error(device: torch.device) -> None:
    """CUDA keeps a failed call's error and raises it at the next kernel launch; launch one here that may fail."""
    with suppress(RuntimeError):
        torch.empty(1, dtype=torch.uint8, device=device).fill_(1)


def numa_node(device: torch.device) -> int | None:
    """Return the node of the host's memory that is the nearest to an accelerator; None where the system does not
    say."""
    found = _module(device).get_device_properties(device)
    try:
        place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int(Path("/sys/bus/pci/devices", place, "numa_node").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None
