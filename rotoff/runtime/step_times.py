"""Measures how long the operations of one step took, lane by lane, to compare them with the machine's prediction.

On CUDA, events on the streams that do the work are read after the step; on the CPU, the host's clock is read by the
thread that does the work. Nothing here waits while the step runs. The bytes are not measured but the machine's: they
depend only on program order (``check=True`` compares them with what the device holds).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from ..accelerator import finish
from ..core.sequence import COMPUTES
from ..core.simulator import Trace
from ..errors import MeasureError
from ..tensors.clock import mark, seconds_between
from .links.base import Link, Ticket

# What following a plan costs where the processor computes: seconds of Python for a stage and for a copy, in caches that
# the kernels between have emptied, and the share of a copy's time by which kernels beside it take longer, where copies
# have a processor of their own and where not. On a GPT, two MLPs and a U-Net with steps of 0.02 to 0.5 s these were 48
# and 53 microseconds, 0.3 to 1.7, and 0.7 to 3.
STAGE_SECONDS, COPY_SECONDS, BESIDE_COPIES = 50e-6, 50e-6, (0.5, 1.0)


def following_seconds(trace: Trace, stages: int) -> float:
    """Return the seconds that a step takes longer than the machine's, if the processor that runs Python computes."""
    copies = [event.end - event.start for event in trace.events if event.lane in ("d2h", "h2d")]
    beside = BESIDE_COPIES[torch.get_num_threads() >= (os.cpu_count() or 1)]
    return STAGE_SECONDS * stages + COPY_SECONDS * len(copies) + beside * sum(copies)


class Recording:
    """The result of `Checkpointable.record_step`: the times of the first step whose forward runs in its block. The
    interpreter reports when operations begin and end, and which copies it starts.

    begun: whether there is such a step.
    """

    def __init__(self) -> None:
        self.begun = self._complete = False
        self._open: int | None = None
        self._marks: dict[int, list[Any]] = {}  # index of the operation -> [begin, end]
        self._copies: dict[int, Ticket] = {}

    def start(self, predicted: Trace, device: torch.device, link: Link | None) -> Recording:
        """A step that `predicted` describes is about to run; its link records the times of its copies meanwhile."""
        self.begun, self._predicted, self._device, self._link = True, predicted, device, link
        if link is not None:
            link.timed = True
        return self

    def begin(self, index: int) -> None:
        """Operation `index` of the sequence is about to run on the compute lane."""
        self._open = index
        self._marks[index] = [mark(self._device)]

    def end(self) -> None:
        """The last operation has been issued; without an open one, this does nothing."""
        if self._open is not None:
            self._marks[self._open].append(mark(self._device))
            self._open = None

    def copy(self, index: int, ticket: Ticket) -> None:
        """Operation `index` has started this copy."""
        self._copies[index] = ticket

    def close(self, complete: bool) -> None:
        """The step is over; `complete` if it ran to its end."""
        self.end()
        self._complete = complete
        if self._link is not None:
            self._link.timed = False
            self._link = None

    @property
    def trace(self) -> Trace:
        """The measured step, in the form of the predicted one; it may be read once its backward has run.

        The caller's own loss, between the last forward and the first backward, shows as idle time.

        Raises:
            MeasureError: if no planned step has run, or it was not finished.
        """
        if not self.begun:
            raise MeasureError(
                "no planned step has run while it was recorded; call the model in training mode in the block"
            )
        if not self._complete:
            raise MeasureError("the recorded step has not run its backward to the end")
        finish(self._device)
        zero = self._marks[0][0]
        events = []
        for index, event in enumerate(self._predicted.events):
            if event.lane == "compute":
                start, end = (seconds_between(zero, moment) for moment in self._marks[index])
            else:
                start, end = self._copies[index].span(zero)
            events.append(event._replace(start=start, end=end))
        makespan = max(event.end for event in events)
        work = [event for event in events if event.op.kind in COMPUTES]
        return replace(
            self._predicted,
            makespan=makespan,
            events=tuple(events),
            recompute_time=sum(event.end - event.start for event in work if event.recompute),
            idle_time=makespan - sum(event.end - event.start for event in work),
        )
