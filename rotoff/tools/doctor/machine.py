"""Checks of the machine: software versions, and the memory of device and host."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

from ...core.sizes import format_bytes
from ...runtime.links.pinned import available_bytes
from ...version import __version__
from .findings import ATTENTION, OK, Finding

TESTED = ((2, 11), (2, 15))  # the oldest and the newest torch that the tests ran with
BUSY = 0.25  # share of the device's memory: if other processes hold more, the check says so
LOADED = 0.5  # processes that run for each core of the machine: with more, it is busy
LITTLE = 4 << 30  # free bytes of the host: with less, plans for a GPU can offload very little


def versions(device: torch.device) -> Finding:
    """Versions of rotoff, torch, CUDA, driver, Python and system."""
    cuda = device.type == "cuda"
    figures: dict[str, Any] = {"rotoff": __version__, "torch": torch.__version__, "python": platform.python_version()}
    figures |= {"system": platform.platform(), "machine": platform.machine()}
    figures |= {"cores": cores(), "load": os.getloadavg()[0], "device": processor()}
    said = f"rotoff {__version__}, torch {torch.__version__}, Python {figures['python']}, {figures['system']}"
    if cuda:
        properties = torch.cuda.get_device_properties(device)
        figures |= {
            "device": properties.name,
            "capability": [properties.major, properties.minor],
            "devices": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "driver": driver(),
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
        }
        said += f", CUDA {figures['cuda']}, driver {figures['driver'] or 'unknown'}"
    said = f"{figures['device']}: {said}"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not TESTED[0] <= release <= TESTED[1]:
        low, high = (".".join(map(str, version)) for version in TESTED)
        return Finding(
            ATTENTION, f"{said}; rotoff is tested with torch {low} to {high}, so read the other checks", figures
        )
    return Finding(OK, said, figures)


def load() -> Finding:
    """Whether others compute on this machine."""
    figures = {"load": os.getloadavg()[0], "cores": os.cpu_count() or 1}
    said = f"{figures['load']:.1f} processes run on {figures['cores']} cores"
    if figures["load"] > LOADED * figures["cores"]:
        return Finding(
            ATTENTION, f"{said}: the machine is busy, so the times below may be off; end other work", figures
        )
    return Finding(OK, said, figures)


def memory(device: torch.device) -> Finding:
    """Total and free memory of device and host."""
    figures = memory_bytes(device)
    host, room = figures["host"], figures["host_room"]
    free_here = host["available"] if room is None else room
    said = f"host {format_bytes(free_here)} free of {format_bytes(host['total'])}" if host else "the host does not say"
    if (limit := figures["address_space"]) is not None:
        said += f", and at most {format_bytes(limit)} of addresses for this process"
    if device.type != "cuda":
        return Finding(OK, f"{said}; on a CPU this is the memory that a limit is about", figures)
    free, total = figures["device_free"], figures["device_total"]
    said = f"device {format_bytes(free)} free of {format_bytes(total)}, {said}"
    if total - free > BUSY * total:
        what = "other processes hold the rest: end them, or expect times and bytes below to be off"
        return Finding(ATTENTION, f"{said}; {what}", figures)
    if free_here is not None and free_here < LITTLE:
        cure = 'if the machine has more than it reports, set ROTOFF_HOST_MEMORY, such as "100 GiB"'
        return Finding(ATTENTION, f"{said}; plans can move little to the host; {cure}", figures)
    return Finding(OK, said, figures)


def memory_bytes(device: torch.device) -> dict[str, Any]:
    """device_free, device_total (CUDA); host: total and available bytes as the system reports them; host_room: the
    bytes that plans may use, None if unknown; address_space: the limit of ``ulimit -v``, None for none."""
    found: dict[str, Any] = {}
    if device.type == "cuda":
        found["device_free"], found["device_total"] = torch.cuda.mem_get_info(device)
    try:
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines())
        named = {"total": "MemTotal", "available": "MemAvailable"}
        found["host"] = {name: 1024 * int(rows[row].split()[0]) for name, row in named.items()}
    except (OSError, ValueError, KeyError, IndexError):
        found["host"] = {}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return found | {"host_room": available_bytes(), "address_space": None if limit == resource.RLIM_INFINITY else limit}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The CPU's name, if the system reports it."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
        return next(row.split(":", 1)[1].strip() for row in rows if row.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def driver() -> str | None:
    """The version of NVIDIA's driver, or None."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
