"""Measures how fast a link copies, for a chain's bandwidths.

Copies by the processor that computes are slower in a step than one after another: kernels have run since the last copy,
and run beside this one, and the bytes that come back go into memory just allocated. Such a link is measured under the
same conditions. What is read has been written before: untouched pages do not exist yet, and may be cheaper.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ...errors import ExecutionError
from ...tensors.clock import mark
from .base import Link

WORK_BYTES = 16 << 20  # that kernels read and write meanwhile: more than a core's own caches hold
PIECE_BYTES = 4 << 20  # of each allocation that a copy fills, as of a typical saved tensor, and at most
LEAST_PIECE = 64 << 10  # and at least: it takes no longer to start a copy than to copy so much
# Bytes and copies between two readings of the clock if copies queue: issuing and awaiting one takes tens of
# microseconds.
QUEUED_BYTES, QUEUED = 32 << 20, 32
LEAST_BYTES = 1 << 20  # of a queued copy if the host has no room for larger ones
BESIDE_BYTES = 32 << 20  # of each copy while both directions are busy: the time to issue it is negligible


def measure_bandwidth(link: Link, nbytes: int, repeats: int = 5, room: int = PIECE_BYTES) -> tuple[float, float]:
    """(device to host, host to device) in bytes per second, each direction alone: medians of at least `repeats` copies.

    link: idle, because its first host bytes are reserved and overwritten. nbytes: of each copy; more than a few tens of
    MiB make it no faster. room: bytes that the device has for it, if copies do not queue.

    Raises:
        rotoff.ExecutionError: where the host has no room for `nbytes` bytes, or a copy fails.
    """
    if not link.queues:
        return _beside_kernels(link, nbytes, 2 * repeats, min(PIECE_BYTES, nbytes, max(LEAST_PIECE, room)))
    nbytes = _least_reserved(link, nbytes)
    link.reserve(nbytes)
    data = link.allocate(nbytes).fill_(1).split(PIECE_BYTES)  # starting the copy of a tensor takes its time, too
    queued = min(QUEUED, -(-QUEUED_BYTES // nbytes))
    outward, inward = [], []
    for _ in range(1 + repeats):
        link.drain()
        start = time.perf_counter()
        written = [link.copy_out(data, 0) for _ in range(queued)]
        link.drain()
        outward.append((time.perf_counter() - start) / queued)
        start = time.perf_counter()
        read = [link.copy_in(data, 0, written[-1]) for _ in range(queued)]
        link.drain()
        inward.append((time.perf_counter() - start) / queued)
        for ticket in (*written, *read):
            link.wait(ticket)
    # The first round creates streams.
    return nbytes / _typical(outward[1:]), nbytes / _typical(inward[1:])


def _beside_kernels(link: Link, nbytes: int, repeats: int, piece: int) -> tuple[float, float]:
    """As `measure_bandwidth`, by the times of the copies themselves, while kernels run. Bytes come back into no more
    than `piece` of the device's."""
    link.reserve(nbytes)
    source, work = link.stand_in(nbytes).fill_(1), link.stand_in(WORK_BYTES).view(torch.float32).fill_(1)
    zero, outward, inward, many = mark(link.device), [0.0], [0.0], max(1, min(PIECE_BYTES, nbytes) // piece)
    for _ in range(1 + repeats):
        written = link.copy_out([source], 0)
        _run_kernels(work, outward[-1])
        link.wait(written)
        read = link.copy_in([link.allocate(piece)] * many, 0, written)
        _run_kernels(work, inward[-1])
        link.wait(read)
        for seconds, ticket in ((outward, written), (inward, read)):
            begin, end = ticket.span(zero)
            seconds.append(end - begin)
    # The first round creates pages and disk blocks.
    return nbytes / _typical(outward[2:]), many * piece / _typical(inward[2:])


def _run_kernels(data: torch.Tensor, seconds: float) -> None:
    """Run kernels on `data` for about so long, but at least one."""
    end = time.perf_counter() + seconds
    while True:
        data.sigmoid_()
        if time.perf_counter() >= end:
            return


def bidirectional_shares(link: Link, repeats: int = 3) -> tuple[float, float]:
    """Return the share of each bandwidth, out and in, that is left while copies run in both directions; at most 1.

    link: one whose copies queue; idle, as for `measure_bandwidth`.

    Raises:
        rotoff.ExecutionError: where the host has no room for 2 * `BESIDE_BYTES`, or a copy fails.
    """
    alone = measure_bandwidth(link, BESIDE_BYTES)
    both = zip(*(both_at_once(link, BESIDE_BYTES) for _ in range(repeats)), strict=True)
    out, back = (min(1.0, statistics.median(rates) / one) for rates, one in zip(both, alone, strict=True))
    return out, back


def both_at_once(link: Link, nbytes: int, copies: int = 8) -> tuple[float, float]:
    """Return (device to host, host to device) in bytes per second, each while the other is busy, by the times of the
    copies themselves.

    link: idle, as for `measure_bandwidth`. nbytes: of each copy. copies: number in each direction.

    Raises:
        rotoff.ExecutionError: where the host has no room for 2 * `nbytes`, or a copy fails.
    """
    link.reserve(2 * nbytes)
    source, target = (link.allocate(nbytes).fill_(1) for _ in range(2))
    written = link.copy_out([source], nbytes)
    link.wait(written)
    link.drain()
    zero = mark(link.device)
    link.timed = True
    try:
        pairs = [(link.copy_out([source], 0), link.copy_in([target], nbytes, written)) for _ in range(copies)]
    finally:
        link.timed = False
    for ticket in (ticket for pair in pairs for ticket in pair):
        link.wait(ticket)
    link.drain()
    spans = [[ticket.span(zero) for ticket in column] for column in zip(*pairs, strict=True)]
    start, end = max(column[0][0] for column in spans), min(column[-1][1] for column in spans)
    out, back = (nbytes * _per_second(column, start, end) for column in spans)
    return out, back


def _per_second(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return how many of these consecutive copies run per second, by those that lie wholly between start and end: after
    it, the slower direction runs alone."""
    since = max([start, *(span[1] for span in spans if span[0] < start)])
    until = min([end, *(span[0] for span in spans if span[1] > end)])
    whole = sum(start <= span[0] and span[1] <= end for span in spans)
    if not whole:
        whole, since, until = len(spans), spans[0][0], spans[-1][1]
    return whole / max(until - since, 1e-9)


def _least_reserved(link: Link, nbytes: int) -> int:
    """Reserve `nbytes`, or less if the host has no room, because plans without moves need none; returns how many."""
    while nbytes > LEAST_BYTES:
        try:
            link.reserve(nbytes)
            return nbytes
        except ExecutionError:
            nbytes = max(nbytes // 4, LEAST_BYTES)
    return nbytes


def _typical(seconds: list[float]) -> float:
    return max(statistics.median(seconds), 1e-9)
