"""The lanes beside compute: copies to the host and back, updates on the host; each lane runs its jobs in issue order.

While copies run in both directions, each direction has its bidirectional bandwidth. So the end of a copy depends on the
jobs issued while it runs. It is computed when something waits for the copy, since nothing is issued meanwhile.
"""

from __future__ import annotations

from collections import deque


class Lanes:
    """Simulates the lanes; jobs are identified by number, in issue order.

    Args:
        duplex, shares: `duplex` and `bidirectional_shares` of a chain.
    """

    def __init__(self, duplex: bool, shares: tuple[float, float]) -> None:
        self._lane = {"d2h": 0, "h2d": 1 if duplex else 0, "host": 2}
        self._shares = shares
        self._jobs: list[tuple[float, float, int | None]] = []
        self._queues: list[deque[int]] = [deque(), deque(), deque()]
        self._ends = [0.0, 0.0, 0.0]  # end of the queue's first job if that has begun, else of the last job that ran
        self._begun = [False, False, False]
        self._start: dict[int, float] = {}
        self._end: dict[int, float] = {}

    def issue(self, lane: str, ready: float, seconds: float, after: int | None = None) -> int:
        """Issue a job on "d2h", "h2d" or "host" that begins at `ready` or later, once the job `after` has ended.

        seconds: its duration while no copy runs in the other direction.
        """
        self._jobs.append((ready, seconds, after))
        self._queues[self._lane[lane]].append(len(self._jobs) - 1)
        return len(self._jobs) - 1

    def end(self, job: int | None) -> float:
        """When `job` ends, if nothing is issued before that; 0 for None."""
        if job is None:
            return 0.0
        while job not in self._end:
            self._next()
        return self._end[job]

    def span(self, job: int) -> tuple[float, float]:
        """Start and end of a job."""
        end = self.end(job)
        return self._start[job], end

    def _next(self) -> None:
        """Let the next job begin or end."""
        at, now = -1, 0.0
        for lane, queue in enumerate(self._queues):
            if not queue:
                continue
            ready, _, after = self._jobs[queue[0]]
            if self._begun[lane]:
                when = self._ends[lane]
            elif after is None or after in self._end:
                when = max(ready, self._ends[lane], 0.0 if after is None else self._end[after])
            else:
                continue
            if at < 0 or when < now:
                at, now = lane, when
        other = 1 - at
        beside = at < 2 and self._begun[other]
        if self._begun[at]:
            self._begun[at] = False
            self._end[self._queues[at].popleft()] = now
            if beside:
                self._ends[other] = _scaled(self._ends[other], now, self._shares[other])
            return
        job = self._queues[at][0]
        self._begun[at], self._start[job], self._ends[at] = True, now, now + self._jobs[job][1]
        if beside:
            self._ends[at] = _scaled(self._ends[at], now, 1 / self._shares[at])
            self._ends[other] = _scaled(self._ends[other], now, 1 / self._shares[other])


def _scaled(end: float, now: float, by: float) -> float:
    """The new `end` of a job whose remaining time at `now` is multiplied by `by`."""
    return end if by == 1 else now + (end - now) * by
