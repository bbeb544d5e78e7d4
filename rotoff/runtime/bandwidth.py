"""How fast a link copies: what a chain's two bandwidths are measured with."""

from __future__ import annotations

import statistics
import time

import torch

from .link import Link


def measure_bandwidth(link: Link, nbytes: int, repeats: int = 5) -> tuple[float, float]:
    """(device to host, host to device) in bytes per second, each direction alone, the median of `repeats` copies.

    link: idle, since its first `nbytes` host bytes are reserved and overwritten. nbytes: the size of the copies that count.

    Raises:
        rotoff.ExecutionError: where the host has no room for `nbytes` bytes, or a copy fails.
    """
    nbytes = max(int(nbytes), 1)
    link.reserve(nbytes)
    data = link.allocate(nbytes)
    if link.typed:
        data = data[: nbytes // 4 * 4].view(torch.float32)
    data.fill_(1)  # untouched pages are not there yet, and may be cheaper to read
    outward, inward = [], []
    for _ in range(repeats + 1):
        link.drain()
        start = time.perf_counter()
        written = link.copy_out([data], 0)
        link.drain()
        middle = time.perf_counter()
        read = link.copy_in([data], 0, written)
        link.drain()
        end = time.perf_counter()
        outward.append(middle - start)
        inward.append(end - middle)
        link.wait(written)
        link.wait(read)
    # The first round brings pages, streams and disk blocks into being.
    return nbytes / _typical(outward), nbytes / _typical(inward)


def _typical(seconds: list[float]) -> float:
    return max(statistics.median(seconds[1:]), 1e-9)
