"""What a model was cut into, as a table: ``print(rotoff.stages(model, sample))``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from .checkpointable import Checkpointable
from .sizes import format_bytes


class FoundStage(NamedTuple):
    """number: in the chain, from 1; 0 for what runs before it, without gradients. module: the modules that it begins and ends
    in. Bytes of its output and of what its backward needs; seconds of its forward and backward. forms: bytes of what its backward
    needs in each smaller form (`Checkpointable.profile` has ``.forms``, which says what they keep, or why there are none)."""

    number: int
    module: str
    output_bytes: int
    saved_bytes: int
    forward_time: float
    backward_time: float
    forms: tuple[int, ...] = ()


class FoundStages:
    """Rows of `FoundStage`, in order.

    strategy: how the stages were found, in words.
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
        """For JSON."""
        return {"strategy": self.strategy, "stages": [row._asdict() for row in self.rows]}

    def __repr__(self) -> str:
        head = ("stage", "module", "output", "saved", "forward", "backward", "or saved")
        cells = [head]
        for row in self.rows:
            sizes = (format_bytes(row.output_bytes), format_bytes(row.saved_bytes)) if row.number else ("", "")
            times = (f"{row.forward_time * 1e3:.3f} ms", f"{row.backward_time * 1e3:.3f} ms") if row.number else ("", "")
            cells.append((str(row.number or "-"), row.module, *sizes, *times, " / ".join(map(format_bytes, row.forms))))
        widths = [max(len(line[n]) for line in cells) for n in range(len(head))]
        lines = [
            "  ".join(
                f"{cell:{'<' if n in (1, 6) else '>'}{width}}"
                for n, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        return "\n".join([f"{len(self.rows)} stages: {self.strategy}", *(line.rstrip() for line in lines)])


def stages(model: nn.Module, *sample: Any, repeats: int = 3, **kwargs: Any) -> FoundStages:
    """The stages that `model` is cut into when it is called with `sample` and `kwargs`, each measured.

    Args:
        model: as for `Checkpointable`; or a `Checkpointable` made with ``stages=``, to see what those become.
        repeats: timed runs of each stage.

    Raises:
        MeasureError: where no way of cutting fits; the sentence says what was tried and how to name stages by hand.
    """
    wrapped = model if isinstance(model, Checkpointable) else Checkpointable(model)
    wrapped.measure(*sample, repeats=repeats, **kwargs)
    profile = wrapped.profile
    rows = [FoundStage(0, stage.name, 0, 0, 0.0, 0.0) for stage in profile.prefix]
    for n, stage in enumerate(profile.chain.stages, 1):
        rows.append(
            FoundStage(
                n,
                stage.name,
                stage.output_bytes,
                stage.saved_bytes,
                stage.forward_time,
                stage.backward_time,
                tuple(form.saved_bytes for form in stage.forms),
            )
        )
    return FoundStages(wrapped.strategy, rows)
