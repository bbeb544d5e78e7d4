"""Collectives of a step on fake tensors: bytes, and seconds on the link between devices.

In a ring of n ranks, each sends (n - 1) / n of a tensor that is gathered or scattered, and twice that in an all-reduce
(Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms, JPDC 2009). FSDP2's collectives run beside the kernels: it
gathers the next block's parameters, and reduces the last block's gradients, while a block computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.sequence import FORWARDS, OpKind
from ...core.trace import Trace
from ..allocations import Event
from ..recorded_step import LOSS, READ
from .devices import Device

_BESIDE = ("_allgather_base_", "_reduce_scatter_base_")  # FSDP2's


class Collective(NamedTuple):
    """One call. nbytes: that a rank sends. at: the number of events in the log before it. beside: whether kernels run
    meanwhile."""

    name: str
    nbytes: int
    seconds: float
    at: int
    beside: bool


def collective(func: Any, args: Any, kwargs: Any, result: Any, device: Device, at: int) -> Collective | None:
    """Return the collective that an operation is; None if it is none."""
    if not func.namespace.lstrip("_").startswith("c10d"):
        return None
    from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

    if func not in collective_ops or func in sync_ops:
        return None
    ranks, name = CollectiveOp.get_process_group(func, args).size(), func.overloadpacket.__name__
    whole = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
    nbytes = whole * (ranks - 1) // ranks * (2 if name.lstrip("_").startswith(("allreduce", "all_reduce")) else 1)
    return Collective(name, nbytes, device.launch_time + nbytes / device.between, at, name in _BESIDE)


@dataclass(frozen=True)
class Collectives:
    """The collectives of a step, by stage from 1 on.

    forward: seconds for which the first run of a stage waits. backward: seconds that begin with the backward of a
    stage, and for which the next one waits. last: seconds after all backwards. shared: whether they and copies to the
    host use the same link; copies go first.
    """

    every: tuple[Collective, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    last: float
    shared: bool

    @classmethod
    def of(
        cls,
        every: Sequence[Collective],
        log: Sequence[Event],
        positions: Sequence[int],
        begins: Sequence[int],
        shared: bool,
    ) -> Collectives:
        """Find the stages of collectives. log: of the step, whose operations are at `positions`. begins: positions at
        which stages begin."""
        forward, backward = [0.0] * (len(begins) + 1), [0.0] * (len(begins) + 1)
        calls = [one for one in every if one.beside]
        slots, waiting, seen = forward, 0.0, 0
        for n, event in enumerate(log):
            while seen < len(calls) and calls[seen].at <= n:
                waiting += calls[seen].seconds
                seen += 1
            if event.begins == LOSS:
                slots = backward
            if not event.begins.isdigit() and not event.begins.startswith(READ):
                continue
            number = int(event.begins.removeprefix(READ))
            at = positions[min(number, len(positions) - 1)] if slots is forward else number
            slots[bisect_right(begins, at)] += waiting
            waiting = 0.0
        last = waiting + sum(one.seconds for one in calls[seen:])
        return cls(tuple(every), tuple(forward), tuple(backward), last, shared)

    def delay(self, trace: Trace) -> float:
        """Return the seconds by which the collectives make a step longer: kernels wait for them."""
        link = _Link([span[1:] for lane in ("d2h", "h2d") for span in trace.spans(lane)] if self.shared else [])
        delay = before = ended = 0.0  # before: the start of the stage before
        ran = stage = 0
        for event in trace.events:
            i, start = event.op.stage, event.start + delay
            if event.op.kind in FORWARDS and i > ran:
                ran = i
                delay += max(0.0, link.work(self.forward[i], before, delay) - start)
                before = event.start + delay
            elif event.op.kind in (*FORWARDS, OpKind.B) and i != stage:
                delay += max(0.0, link.free - start)
                free = link.work(self.backward[i], event.start + delay, delay)
                delay += 0.0 if stage else max(0.0, free - event.start - delay)  # nothing was gathered before
                stage = i
            ended = event.end if event.op.kind is OpKind.B else ended
        return delay + max(0.0, link.work(self.last, ended + delay, delay) - ended - delay)


class _Link:
    """Between devices. copies: start and end of each that uses it, too, and goes first."""

    def __init__(self, copies: Iterable[tuple[float, float]]) -> None:
        self.free = 0.0  # when all work so far has been done
        self._copies = deque(sorted(copies))

    def work(self, seconds: float, start: float, delay: float) -> float:
        """Return when work that can begin at `start` is done, after all before. delay: of the copies."""
        start = max(self.free, start)
        self.free = start + seconds
        while seconds and self._copies and self._copies[0][0] + delay < self.free:
            begin, end = self._copies.popleft()
            self.free += max(0.0, end + delay - max(start, begin + delay))
        return self.free
