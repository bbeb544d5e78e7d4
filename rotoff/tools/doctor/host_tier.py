"""Checks of the memory behind the device (pinned memory, or a file for a CPU) and of the bandwidth to it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from ...core.sizes import format_bytes
from ...runtime.links.bandwidth import both_at_once, measure_bandwidth
from ...runtime.links.host_file import HostFile, choose_directory, filesystem_of
from ...runtime.links.pinned import SEGMENT_BYTES, Segment, Slab, available_bytes, pin
from ...runtime.links.pool import LinkPool
from .findings import ATTENTION, FAILED, OK, Finding

MIB = 1 << 20
PINNED = 2 * SEGMENT_BYTES  # bytes to pin: more than one segment
FILE = 256 * MIB
COPIED = {"cuda": 256 * MIB, "cpu": 16 * MIB}  # bytes of one copy
MOST = 2e12  # B/s: no link and no page cache is faster
BESIDE = 0.2, 1.5  # least and most share of a bandwidth that is left while the other direction is busy
SLOW = 5e9  # B/s to or from a GPU: about half of PCIe 3 with 16 lanes


def host_bytes(device: torch.device) -> Finding:
    """Check that host memory can be allocated, and how long that takes."""
    return pinned_memory(device) if device.type == "cuda" else offload_file()


def pinned_memory(device: torch.device) -> Finding:
    """Pin `PINNED` bytes, or a quarter of the free host memory if that is less."""
    room = available_bytes()
    nbytes = max(MIB, PINNED if room is None else min(PINNED, room // 4))
    figures = pinning(nbytes, device)
    said = (
        f"{format_bytes(nbytes)} pinned at {rate(nbytes / max(figures['pin'], 1e-9))}, in {figures['segments']}"
        " segments"
    )
    if not figures["across"]:
        return Finding(FAILED, f"{said}; bytes came back from there as others; send the file", figures)
    if figures["registered"] < figures["segments"]:
        refused = (
            "the driver registers no pages of the process, so PyTorch's own allocator pins them and rounds up to a"
            " power of two"
        )
        return Finding(ATTENTION, f"{said}; {refused}; plan with a host_limit of half of the host's memory", figures)
    return Finding(OK, said, figures)


def pinning(nbytes: int, device: torch.device) -> dict[str, Any]:
    """Pin `nbytes` and release them. pin, unpin: seconds. segments, registered: how many segments there are, and how
    many of them the driver registered in place."""
    start = time.perf_counter()
    segments = pin(nbytes, device)
    pinned = time.perf_counter()
    across = device_bytes_across(segments, device)
    registered = sum(bool(getattr(segment, "_address", 0)) for segment in segments)
    for segment in segments:
        segment.close()
    seconds = {"pin": pinned - start, "unpin": time.perf_counter() - pinned}
    return {"nbytes": nbytes, **seconds, "segments": len(segments), "registered": registered, "across": across}


def device_bytes_across(segments: Sequence[Segment], device: torch.device) -> bool:
    """Whether bytes come back from a place across the first two of `segments` as they left."""
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
    return torch.equal(data, back)


def offload_file() -> Finding:
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
    return Finding(OK, f"a file in {where} stands for the host", figures)


def bandwidth(device: torch.device) -> Finding:
    """Measure the bandwidth of copies to the host, from it, and both at once."""
    room = available_bytes() if device.type == "cuda" else None
    figures: dict[str, Any] = {
        "nbytes": COPIED[device.type] if room is None else max(1, min(COPIED[device.type], room // 4))
    }
    figures |= bandwidths(device, figures["nbytes"])
    out, back = figures["out"], figures["in"]
    said = (
        f"out {rate(out)}, in {rate(back)}; both at once {rate(figures['out_beside_in'])} and"
        f" {rate(figures['in_beside_out'])}"
    )
    beside = figures["out_beside_in"] / out, figures["in_beside_out"] / back
    if max(out, back) > MOST or min(beside) < BESIDE[0] or max(beside) > BESIDE[1]:
        return Finding(ATTENTION, f"{said}; that cannot be right: run this again on a quiet machine", figures)
    if device.type == "cuda" and min(out, back) < SLOW:
        cure = (
            "see that the GPU sits in a slot of 16 lanes (nvidia-smi -q -d PCIE) and nothing else copies; plans"
            " recompute more"
        )
        return Finding(ATTENTION, f"{said}; this is slow for a GPU: {cure}", figures)
    return Finding(OK, said, figures)


def bandwidths(device: torch.device, nbytes: int) -> dict[str, float]:
    """B/s of copies of `nbytes`: each direction alone, and each while the other is busy."""
    links = LinkPool()
    link = links.take(device, 0)
    try:
        out, back = measure_bandwidth(link, nbytes)
        out_beside, back_beside = both_at_once(link, nbytes)
    finally:
        links.give_back(link)
        links.close()
    return {"out": out, "in": back, "out_beside_in": out_beside, "in_beside_out": back_beside}


def rate(per_second: float) -> str:
    """Format a bandwidth, such as "24.1 GB/s"."""
    return f"{per_second / 1e9:.3g} GB/s"
