"""How fast a link copies: what a chain's two bandwidths are measured with.

A link whose copies run through the processor's caches moves the same few bytes again two to three times as fast as a
step, which comes back to a value only after all the others. There the copies go round as many bytes as a step may move,
or as no cache holds, on the device as on the host: those of one value to many places of the host are still faster than
a step's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ...errors import ExecutionError
from ...tensors.clock import mark
from .base import Link

# Many times what a core's own caches hold.
COLD_BYTES = 64 << 20
# What is copied between two looks at the clock where copies queue: asking for a copy and seeing it done takes tens of
# microseconds.
QUEUED_BYTES, QUEUED = 32 << 20, 32
# More makes a copy that queues no faster, and takes as much pinned memory and as much of the device.
MOST_QUEUED_BYTES = 256 << 20
LEAST_BYTES = 1 << 20  # of them, where the host has no more
BESIDE_BYTES = 32 << 20  # of the copies that run in both directions: asking for them takes no time beside theirs


def measure_bandwidth(link: Link, nbytes: int, step_bytes: int = 0, repeats: int = 5) -> tuple[float, float]:
    """(device to host, host to device) in bytes per second, each direction alone: medians of at least `repeats` copies.

    link: idle, since its first host bytes are reserved and overwritten. nbytes: the size of the copies that count, of
    which a link where they queue needs no more than `MOST_QUEUED_BYTES`. step_bytes: that a step may move in all.

    Raises:
        rotoff.ExecutionError: where the host has no room for `nbytes` bytes, or a copy fails.
    """
    nbytes = max(int(nbytes), 1)
    if link.queues:
        nbytes = _least_reserved(link, min(nbytes, MOST_QUEUED_BYTES))
    places = _reserve(link, nbytes, -(-min(int(step_bytes), COLD_BYTES) // nbytes) if link.cached else 1)
    values = _values(link, nbytes, places)
    rounds = max(2, -(-repeats // places)) if places > 1 else repeats
    queued = min(QUEUED, -(-QUEUED_BYTES // nbytes)) if link.queues else 1
    outward, inward = [], []
    for _ in range(1 + rounds):
        written = []
        for n, data in enumerate(values):
            link.drain()
            start = time.perf_counter()
            tickets = [link.copy_out([data], n * nbytes) for _ in range(queued)]
            link.drain()
            outward.append((time.perf_counter() - start) / queued)
            written.append(tickets)
        for n, data in enumerate(values):
            start = time.perf_counter()
            read = [link.copy_in([data], n * nbytes, written[n][-1]) for _ in range(queued)]
            link.drain()
            inward.append((time.perf_counter() - start) / queued)
            for ticket in (*written[n], *read):
                link.wait(ticket)
    # The first round brings pages, streams and disk blocks into being.
    return nbytes / _typical(outward[places:]), nbytes / _typical(inward[places:])


def bidirectional_shares(link: Link, repeats: int = 3) -> tuple[float, float]:
    """What is left of the bandwidth out, and of that in, while copies run in both directions; 1 is all of it.

    link: one where copies queue, idle, as for `measure_bandwidth`.

    Raises:
        rotoff.ExecutionError: where the host has no room for 2 * `BESIDE_BYTES`, or a copy fails.
    """
    alone = measure_bandwidth(link, BESIDE_BYTES)
    both = zip(*(both_at_once(link, BESIDE_BYTES) for _ in range(repeats)), strict=True)
    out, back = (min(1.0, statistics.median(rates) / one) for rates, one in zip(both, alone, strict=True))
    return out, back


def both_at_once(link: Link, nbytes: int, copies: int = 8) -> tuple[float, float]:
    """(device to host, host to device) in bytes per second, each while the other one is busy, by the times of the
    copies themselves.

    link: idle, as for `measure_bandwidth`. nbytes: of each of the `copies` that go each way.

    Raises:
        rotoff.ExecutionError: where the host has no room for 2 * `nbytes`, or a copy fails.
    """
    link.reserve(2 * nbytes)
    source, target = (_touched(link, link.allocate(nbytes)) for _ in range(2))
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
    """How many of these copies, one after the other, run in a second between start and end, by those that lie there
    whole: what is left of the slower direction in the end runs alone."""
    since = max([start, *(span[1] for span in spans if span[0] < start)])
    until = min([end, *(span[0] for span in spans if span[1] > end)])
    whole = sum(start <= span[0] and span[1] <= end for span in spans)
    if not whole:
        whole, since, until = len(spans), spans[0][0], spans[-1][1]
    return whole / max(until - since, 1e-9)


def _least_reserved(link: Link, nbytes: int) -> int:
    """Reserve `nbytes`, or less where the host has no room for that, since plans without moves need none; how many it
    is."""
    while nbytes > LEAST_BYTES:
        try:
            link.reserve(nbytes)
            return nbytes
        except ExecutionError:
            nbytes = max(nbytes // 4, LEAST_BYTES)
    return nbytes


def _reserve(link: Link, nbytes: int, places: int) -> int:
    """Reserve that many times `nbytes`, or one where the host has no room for more; how many it is."""
    if places > 1:
        try:
            link.reserve(nbytes * places)
            return places
        except ExecutionError:
            pass
    link.reserve(nbytes)
    return 1


def _values(link: Link, nbytes: int, places: int) -> list[torch.Tensor]:
    """One for each place; all the same where there is no room for so many."""
    if places > 1:
        try:
            return [_touched(link, data) for data in link.stand_in(nbytes * places).split(nbytes)]
        except ExecutionError:
            pass
    return [_touched(link, link.allocate(nbytes))] * places


def _touched(link: Link, data: torch.Tensor) -> torch.Tensor:
    if link.typed:
        data = data[: data.numel() // 4 * 4].view(torch.float32)
    return data.fill_(1)  # untouched pages are not there yet, and may be cheaper to read


def _typical(seconds: list[float]) -> float:
    return max(statistics.median(seconds), 1e-9)
