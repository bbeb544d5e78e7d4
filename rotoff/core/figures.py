"""The figures of one training step: limit, peak, time, overhead, and what keeping everything takes. The log, texts,
tables, pictures and trace files all show these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .sizes import format_bytes


@dataclass(frozen=True)
class Figures:
    """What one training step takes and costs.

    mem_limit: bytes; None: there is none.
    peak_bytes, host_bytes: the most that device and host hold, for all micro-batches in flight.
    step_time: seconds, with the updates if the chain has parameters.
    keep_all_time, keep_all_bytes: of the step that keeps everything, in the same terms; bytes are None if unknown.
    with_batch: whether bytes on the device count the batch, as a chain does and a `mem_limit` of `Checkpointable` does
        not.
    """

    mem_limit: int | None
    peak_bytes: int
    host_bytes: int
    step_time: float
    keep_all_time: float
    keep_all_bytes: int | None = None
    with_batch: bool = True

    @property
    def fits(self) -> bool:
        """Whether the step keeps its limit."""
        return self.mem_limit is None or self.peak_bytes <= self.mem_limit

    @property
    def overhead(self) -> float:
        """The step's time over that of keeping everything, less 1."""
        return overhead(self.step_time, self.keep_all_time)

    @property
    def peak(self) -> str:
        """Peak and limit as text."""
        of = "" if self.mem_limit is None else f" of {format_bytes(self.mem_limit)}"
        return f"{format_bytes(self.peak_bytes)}{of}{self._batch}"

    @property
    def everything(self) -> str:
        """The bytes of keeping everything as text."""
        return f"{format_bytes(self.keep_all_bytes or 0)}{self._batch}"

    @property
    def _batch(self) -> str:
        return " with the batch" if self.with_batch else ""


def overhead(seconds: float, keep_all_seconds: float) -> float:
    """Seconds of a step over those of keeping everything, less 1. Sums of the same times may differ in their last
    digit, so it is rounded."""
    return round(seconds / keep_all_seconds - 1, 12) + 0.0 if keep_all_seconds else 0.0  # + 0.0: never -0.0


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines with aligned columns. left: numbers of those that begin at the left."""
    cells = [head, *rows]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    shapes = [f"{'<' if n in left else '>'}{width}" for n, width in enumerate(widths)]
    return ["  ".join(map(format, row, shapes)).rstrip() for row in cells]


def percent(share: float) -> str:
    """A share of a time as text, such as ``"+3.4%"``."""
    return f"{round(100 * share, 1) + 0.0:+.1f}%"
