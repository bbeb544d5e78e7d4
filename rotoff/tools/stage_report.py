"""What a model was cut into, as a table: ``print(rotoff.stages(model, sample))``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..checkpointable import Checkpointable
from ..core.sizes import format_bytes


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


class FoundSkip(NamedTuple):
    """A skip connection: `nbytes` that the outputs of stages `first` (which makes them) to `last` carry. kept: whether the plan
    keeps them in place instead; None where there is no plan."""

    first: int
    last: int
    nbytes: int
    kept: bool | None = None


class FoundStages:
    """Rows of `FoundStage`, in order.

    strategy: how the stages were found, in words. skips: what several of them carry.
    """

    def __init__(self, strategy: str, rows: list[FoundStage], skips: Sequence[FoundSkip] = ()) -> None:
        self.strategy = strategy
        self.rows = rows
        self.skips = tuple(skips)

    def __iter__(self) -> Iterator[FoundStage]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> FoundStage:
        return self.rows[index]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows, skips = [row._asdict() for row in self.rows], [skip._asdict() for skip in self.skips]
        return {"strategy": self.strategy, "stages": rows, "skips": skips}

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
        fate = {None: "may be kept in place", False: "carried", True: "kept in place"}
        skips = [f"skip of {format_bytes(s.nbytes)}, stages {s.first} to {s.last}: {fate[s.kept]}" for s in self.skips]
        return "\n".join([f"{len(self.rows)} stages: {self.strategy}", *(line.rstrip() for line in lines), *skips])


def stages(model: nn.Module, *sample: Any, repeats: int = 3, **kwargs: Any) -> FoundStages:
    """The stages that `model` is cut into when it is called with `sample` and `kwargs`, each measured.

    Args:
        model: as for `Checkpointable`; or a `Checkpointable` made with ``stages=``, to see what those become. Where it has been
            given a limit, it is planned for that too, and the skip connections say whether they are kept in place.
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
    if wrapped._courses.request is not None:
        wrapped._courses.ask(wrapped._courses.request)
    kept = wrapped.kept_skips
    skips = [FoundSkip(s.first, s.last, s.nbytes, None if kept is None else n in kept) for n, s in enumerate(profile.skips)]
    return FoundStages(wrapped.strategy, rows, skips)
