"""Checks of the machine: versions, load, memory of device and host, and the bandwidth between them."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from ...accelerator import described, is_accelerator, memory_of
from ...core.sizes import format_bytes
from ...runtime.links.bandwidth import both_at_once, measure_bandwidth
from ...runtime.links.host_file import HostFile, choose_directory, filesystem_of
from ...runtime.links.pinned import SEGMENT_BYTES, Slab, available_bytes, meminfo, pin
from ...runtime.links.pool import LinkPool
from ...version import __version__
from .findings import ATTENTION, FAILED, Finding, judged

TESTED = ((2, 11), (2, 15))  # the oldest and the newest torch that the tests ran with
BUSY = 0.25  # share of the device's memory: if other processes hold more, the check says so
LOADED = 0.5  # processes that run for each core of the machine: with more, it is busy
LITTLE = 4 << 30  # free bytes of the host: with less, plans for a GPU can offload very little
MIB = 1 << 20
PINNED = 2 * SEGMENT_BYTES  # bytes to pin: more than one segment
FILE = 256 * MIB
COPIED, COPIED_ON_CPU = 256 * MIB, 16 * MIB  # bytes of one copy
MOST = 2e12  # B/s: no link and no page cache is faster
BESIDE = 0.2, 1.5  # least and most share of a bandwidth that is left while the other direction is busy
SLOW = 5e9  # B/s to or from a GPU: about half of PCIe 3 with 16 lanes


def versions(device: torch.device) -> Finding:
    """Versions of rotoff, torch, CUDA, driver, Python and system."""
    figures: dict[str, Any] = {"rotoff": __version__, "torch": torch.__version__, "python": platform.python_version()}
    figures |= {"system": platform.platform(), "machine": platform.machine()}
    figures |= {"cores": cores(), "device": processor()}
    said = f"rotoff {__version__}, torch {torch.__version__}, Python {figures['python']}, {figures['system']}"
    if is_accelerator(device):
        figures |= described(device) | {"driver": _driver()}
        said += f", CUDA {figures['cuda']}, driver {figures['driver'] or 'unknown'}"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = (".".join(map(str, version)) for version in TESTED)
    untested = f"rotoff is tested with torch {low} to {high}, so read the other checks"
    outside = not TESTED[0] <= release <= TESTED[1]
    return judged(figures, f"{figures['device']}: {said}", (outside, ATTENTION, untested))


def load(_device: torch.device) -> Finding:
    """Whether others compute on this machine."""
    figures = {"load": os.getloadavg()[0], "cores": os.cpu_count() or 1}
    busy = "the machine is busy, so the times below may be off: end other work"
    said = f"{figures['load']:.1f} processes run on {figures['cores']} cores"
    return judged(figures, said, (figures["load"] > LOADED * figures["cores"], ATTENTION, busy))


def memory(device: torch.device) -> Finding:
    """Total and free memory of device and host. In the figures, host_room is what plans may use, None if unknown."""
    total, available, room = meminfo("MemTotal"), meminfo("MemAvailable"), available_bytes()
    host = {} if total is None or available is None else {"total": total, "available": available}
    figures: dict[str, Any] = {"host": host, "host_room": room}
    free_here = available if room is None else room
    said = f"host {format_bytes(free_here or 0)} free of {format_bytes(total or 0)}" if host else "host unknown"
    if not is_accelerator(device):
        return judged(figures, f"{said}; on a CPU this is the memory that a limit is about")
    free, total = memory_of(device)
    figures |= {"device_free": free, "device_total": total}
    held = "other processes hold the rest: end them, or expect times and bytes below to be off"
    more = 'if the machine has more than it reports, set ROTOFF_HOST_MEMORY, such as "100 GiB"'
    return judged(
        figures,
        f"device {format_bytes(free)} free of {format_bytes(total)}, {said}",
        (total - free > BUSY * total, ATTENTION, held),
        (free_here is not None and free_here < LITTLE, ATTENTION, f"plans can move little to the host; {more}"),
    )


def host_bytes(device: torch.device) -> Finding:
    """Check that host memory can be allocated, and how long that takes."""
    return _pinned(device) if is_accelerator(device) else _file()


def _pinned(device: torch.device) -> Finding:
    """Pin `PINNED` bytes, or a quarter of the free host memory if that is less, and copy across two segments. In the
    figures, segments and registered are how many there are, and how many of them the driver registered in place."""
    room = available_bytes()
    nbytes = max(MIB, PINNED if room is None else min(PINNED, room // 4))
    start = time.perf_counter()
    segments = pin(nbytes, device)
    pinned = time.perf_counter()
    slab, middle = Slab(), segments[0].tensor.numel()
    for segment in segments:
        slab.add(segment)
    size = min(MIB, slab.nbytes)
    places = list(slab.pieces(min(middle, slab.nbytes - size // 2) - size // 2, size))
    data = torch.arange(size, device=device).to(torch.uint8)
    back = torch.zeros_like(data)
    for whole, out in ((data, True), (back, False)):
        for place, part in zip(places, whole.split([place.numel() for place in places]), strict=True):
            place.copy_(part, non_blocking=True) if out else part.copy_(place, non_blocking=True)
    across, registered = torch.equal(data, back), sum(bool(getattr(one, "_address", 0)) for one in segments)
    for segment in segments:
        segment.close()
    figures = {"nbytes": nbytes, "pin": pinned - start, "unpin": time.perf_counter() - pinned}
    figures |= {"segments": len(segments), "registered": registered, "across": across}
    said = f"{format_bytes(nbytes)} pinned at {_rate(nbytes / max(pinned - start, 1e-9))}, in {len(segments)} segments"
    refused = (
        "the driver registers no pages of the process, so PyTorch's own allocator pins them and rounds up to a power of"
        " two; plan with a host_limit of half of the host's memory"
    )
    return judged(
        figures,
        said,
        (not across, FAILED, "bytes came back from there as others; send the file"),
        (registered < len(segments), ATTENTION, refused),
    )


def _file() -> Finding:
    """Reserve `FILE` bytes of the file that replaces host memory on a CPU."""
    directory = choose_directory()
    start = time.perf_counter()
    file = HostFile(directory)
    try:
        file.reserve(FILE)
    finally:
        file.close()
    stat = os.statvfs(directory)
    figures: dict[str, Any] = {"nbytes": FILE, "reserve": time.perf_counter() - start}
    figures |= {"file_system": filesystem_of(directory), "free": stat.f_bavail * stat.f_frsize}
    where = f"{directory} ({figures['file_system'] or 'unknown'}, {format_bytes(figures['free'])} free)"
    return judged(figures, f"a file in {where} stands for the host")


def bandwidth(device: torch.device) -> Finding:
    """Measure the bandwidth of copies to the host, from it, and both at once."""
    room = available_bytes() if is_accelerator(device) else None
    nbytes = COPIED if is_accelerator(device) else COPIED_ON_CPU
    nbytes = nbytes if room is None else max(1, min(nbytes, room // 4))
    links = LinkPool()
    link = links.take(device, 0)
    try:
        rates = (*measure_bandwidth(link, nbytes), *both_at_once(link, nbytes))
    finally:
        links.give_back(link)
        links.close()
    figures = {"nbytes": nbytes, **dict(zip(("out", "in", "out_beside_in", "in_beside_out"), rates, strict=True))}
    return judge_rates(device, figures)


def judge_rates(device: torch.device, figures: dict[str, Any]) -> Finding:
    """The finding for measured bandwidths."""
    out, back, *at_once = (figures[name] for name in ("out", "in", "out_beside_in", "in_beside_out"))
    said = f"out {_rate(out)}, in {_rate(back)}; both at once {_rate(at_once[0])} and {_rate(at_once[1])}"
    beside = at_once[0] / out, at_once[1] / back
    wrong = max(out, back) > MOST or min(beside) < BESIDE[0] or max(beside) > BESIDE[1]
    cure = (
        "this is slow for a GPU: see that the GPU sits in a slot of 16 lanes (nvidia-smi -q -d PCIE) and nothing else"
        " copies; plans recompute more"
    )
    return judged(
        figures,
        said,
        (wrong, ATTENTION, "that cannot be right: run this again on a quiet machine"),
        (is_accelerator(device) and min(out, back) < SLOW, ATTENTION, cure),
    )


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rate(per_second: float) -> str:
    return f"{per_second / 1e9:.3g} GB/s"


def processor() -> str:
    """The CPU's name, if the system reports it."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
        return next(row.split(":", 1)[1].strip() for row in rows if row.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The version of NVIDIA's driver, or None."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
