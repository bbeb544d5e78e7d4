"""The stages of a model, as a table: ``print(rotoff.stages(model, sample))``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..checkpointable import Checkpointable
from ..core.sizes import format_bytes


class FoundStage(NamedTuple):
    """One row of `FoundStages`.

    number: place in the chain, from 1.
    module: the modules in which it begins and ends.
    output_bytes, saved_bytes: bytes of its output, and of everything that its backward needs.
    forward_time, backward_time: seconds.
    forms: saved bytes of each smaller form.
    """

    number: int
    module: str
    output_bytes: int
    saved_bytes: int
    forward_time: float
    backward_time: float
    forms: tuple[int, ...] = ()


class FoundStages:
    """Rows of `FoundStage`, in order.

    strategy: how the stages were found, as text.
    """

    def __init__(self, strategy: str, rows: list[FoundStage]) -> None:
        self.strategy = strategy
        self.rows = rows

    def __iter__(self) -> Iterator[FoundStage]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> FoundStage:
        return self.rows[index]

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {"strategy": self.strategy, "stages": [row._asdict() for row in self.rows]}

    def __repr__(self) -> str:
        head = ("stage", "module", "output", "saved", "forward", "backward", "or saved")
        cells: list[tuple[str, ...]] = [head]
        for row in self.rows:
            sizes = format_bytes(row.output_bytes), format_bytes(row.saved_bytes)
            times = (f"{seconds * 1e3:.3f} ms" for seconds in (row.forward_time, row.backward_time))
            cells.append((str(row.number), row.module, *sizes, *times, " / ".join(map(format_bytes, row.forms))))
        widths = [max(len(line[n]) for line in cells) for n in range(len(head))]
        shapes = [f"{'<' if n in (1, 6) else '>'}{width}" for n, width in enumerate(widths)]
        lines = ["  ".join(map(format, line, shapes)) for line in cells]
        return "\n".join([self.strategy, *(line.rstrip() for line in lines)])


def stages(model: nn.Module, *sample: Any, repeats: int = 3, **kwargs: Any) -> FoundStages:
    """Cut `model` into stages for `sample` and `kwargs`, and measure each one, to see what rotoff plans for.

    Args:
        model: as for `Checkpointable`; or a `Checkpointable`, to see the effect of its ``stages=``.
        repeats: how many steps are recorded.

    Raises:
        MeasureError: if the model cannot run on the sample.
    """
    wrapped = model if isinstance(model, Checkpointable) else Checkpointable(model)
    wrapped.measure(*sample, repeats=repeats, **kwargs)
    profile = wrapped.profile
    rows = []
    for n, s in enumerate(profile.chain.stages, 1):
        forms = tuple(form.saved_bytes for form in s.forms)
        rows.append(FoundStage(n, s.name, s.output_bytes, s.saved_bytes, s.forward_time, s.backward_time, forms))
    return FoundStages(wrapped.strategy, rows)
