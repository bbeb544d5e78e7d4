"""Times a stage: its forward, its backward, and the tail that a replay may leave out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...accelerator import finish, is_accelerator
from ...tensors.clock import mark, seconds_between
from ...tensors.saved_tensors import watch_saved
from ...tensors.tree import flatten
from .convergence import Repeats, Series
from .harness import Run, backward, get_edges

LEAST_TAIL = 0.01  # share of a stage's forward; a shorter tail is not timed and counts as none
HOST_BOUND = 0.9  # share of the device's time; a host that takes longer to launch does not run ahead
MOST_COPIED = 256 << 20  # bytes; larger copies are no faster


class Clock:
    """Records when `device` reaches each tick."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._host: list[float] = []  # empty if the host is the device

    def tick(self) -> None:
        if is_accelerator(self._device):
            self._host.append(time.perf_counter())
        self._marks.append(mark(self._device))

    def spans(self) -> list[float]:
        """Return the seconds from each tick to the next; 0 after the last."""
        finish(self._device)
        return _spans(self._marks)

    def host_spans(self) -> list[float]:
        """Return the seconds that the host took between ticks; an empty list if host and device are one."""
        return _spans(self._host)


def _spans(marks: Sequence[Any]) -> list[float]:
    return [*(seconds_between(a, b) for a, b in pairwise(marks)), 0.0][: len(marks)]


class EarlyStop(NamedTuple):
    """Where a replay for its own backward may stop.

    Attributes:
        early_stop: as in `Behaviour`.
        share: of the stage's seconds, when its operations were recorded, that the rest takes.
    """

    early_stop: int = 0
    share: float = 0.0


@dataclass
class Timings:
    """Seconds of the stages of one kind, run by run.

    Attributes:
        tails: the share of a forward that a replay may leave out.
        host: what the host took to launch a forward and a backward; empty if it is the device.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    @property
    def host_bound(self) -> bool:
        """Whether the device waits for the host: events cannot be closer together than their launches."""
        device = statistics.median(self.forward) + statistics.median(self.backward)
        return bool(self.host) and statistics.median(self.host) >= HOST_BOUND * device

    def series(self) -> list[Series]:
        found = [Series(self.forward), Series(self.backward)]
        return [*found, Series(self.tails, 1.0)] if self.tails else found

    def medians(self) -> tuple[float, float, float]:
        """Return the medians of the forward, the backward and the tail.

        The tail is the median share of one forward. The difference of two forwards, each with its own noise, would be
        useless for a short tail.
        """
        forward, backward = statistics.median(self.forward), statistics.median(self.backward)
        return forward, backward, forward * statistics.median(self.tails) if self.tails else 0.0


def time_stage(run: Run, end: EarlyStop, repeats: Repeats, device: torch.device, timings: Timings) -> None:
    """Run forward and backward, and a forward with its tail apart, until the times converge; add them to `timings`."""
    tailed = end.share >= LEAST_TAIL and not run.last  # the last stage is never replayed for its output
    width = 7 if tailed else 4
    ticks = Clock(device)
    before = replace(timings, **{name: [*runs] for name, runs in vars(timings).items()})

    def series() -> list[Series]:
        spans = ticks.spans()
        timings.forward[:] = before.forward + spans[0::width]
        timings.backward[:] = before.backward + spans[2::width]
        host = ticks.host_spans()
        timings.host[:] = before.host + [a + b for a, b in zip(host[0::width], host[2::width], strict=True)]
        if tailed:
            parts = zip(spans[4::width], spans[5::width], strict=True)
            timings.tails[:] = before.tails + [behind / (front + behind or 1.0) for front, behind in parts]
        return timings.series()

    for _ in repeats.rounds(series):
        leaves = run.leaves()
        ticks.tick()
        outputs = flatten(run.forward(leaves))[0]
        ticks.tick()
        edges, needed = get_edges(outputs), [t.requires_grad for t in outputs]
        targets = run.targets(leaves, edges)
        del outputs  # before there are gradients
        gradients = run.gradients(needed)
        ticks.tick()
        backward(edges, gradients, targets)
        ticks.tick()
        del leaves, edges, targets, gradients
        if tailed:
            _run_with_tail(run, end.early_stop, ticks.tick)
    series()


def _run_with_tail(run: Run, early_stop: int, tick: Callable[[], None]) -> None:
    """Run a forward; call `tick` before it, when it has saved `early_stop` tensors, and at its end."""
    leaves = run.leaves()
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> None:
        saved.append(tensor.detach())
        if len(saved) == early_stop:
            tick()

    with watch_saved(keep):
        tick()
        outputs = run.forward(leaves)
    tick()
    del outputs


def copy_bandwidth(nbytes: float, device: torch.device) -> float:
    """Return the bandwidth at which a tensor of `nbytes`, at most `MOST_COPIED`, is copied on `device`, in B/s. It is
    the median of five copies, after one that does not count."""
    nbytes = max(1, min(int(nbytes), MOST_COPIED))
    source, ticks = torch.zeros(nbytes, dtype=torch.uint8, device=device), Clock(device)
    source.clone()
    for _ in range(5):
        ticks.tick()
        source.clone()
        ticks.tick()
    return source.numel() / max(statistics.median(ticks.spans()[::2]), 1e-9)
