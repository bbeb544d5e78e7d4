"""The stages of a model, as a table: ``print(rotoff.stages(model, sample))``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..checkpointable import Checkpointable
from ..core.sizes import format_bytes


class FoundStage(NamedTuple):
    """One row of `FoundStages`.

    number: place in the chain, from 1; 0 for stages before the chain, which need no gradients.
    module: the modules in which it begins and ends.
    output_bytes, saved_bytes: bytes of its output, and of everything that its backward needs.
    forward_time, backward_time: seconds.
    forms: saved bytes of each smaller form; ``Checkpointable.profile.forms`` has the details.
    """

    number: int
    module: str
    output_bytes: int
    saved_bytes: int
    forward_time: float
    backward_time: float
    forms: tuple[int, ...] = ()


class FoundSkip(NamedTuple):
    """A skip connection: `nbytes` that stage `first` makes and all stages up to `last` pass on in their outputs.

    kept: whether the plan keeps it in place; None without a plan.
    """

    first: int
    last: int
    nbytes: int
    kept: bool | None = None


class FoundStages:
    """Rows of `FoundStage`, in order.

    strategy: how the stages were found, as text.
    skips: the skip connections.
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
        """The result for JSON."""
        rows, skips = [row._asdict() for row in self.rows], [skip._asdict() for skip in self.skips]
        return {"strategy": self.strategy, "stages": rows, "skips": skips}

    def __repr__(self) -> str:
        head = ("stage", "module", "output", "saved", "forward", "backward", "or saved")
        cells: list[tuple[str, ...]] = [head]
        for row in self.rows:
            sizes = (format_bytes(row.output_bytes), format_bytes(row.saved_bytes)) if row.number else ("", "")
            seconds = (row.forward_time, row.backward_time) if row.number else ()
            times = tuple(f"{s * 1e3:.3f} ms" for s in seconds) or ("", "")
            cells.append((str(row.number or "-"), row.module, *sizes, *times, " / ".join(map(format_bytes, row.forms))))
        widths = [max(len(line[n]) for line in cells) for n in range(len(head))]
        shapes = [f"{'<' if n in (1, 6) else '>'}{width}" for n, width in enumerate(widths)]
        lines = ["  ".join(map(format, line, shapes)) for line in cells]
        fate = {None: "may be kept in place", False: "carried", True: "kept in place"}
        skips = [f"skip of {format_bytes(s.nbytes)}, stages {s.first} to {s.last}: {fate[s.kept]}" for s in self.skips]
        return "\n".join([f"{len(self.rows)} stages: {self.strategy}", *(line.rstrip() for line in lines), *skips])


def stages(model: nn.Module, *sample: Any, repeats: int = 3, **kwargs: Any) -> FoundStages:
    """Cut `model` into stages for `sample` and `kwargs`, and measure each one, to see what rotoff plans for.

    Args:
        model: as for `Checkpointable`; or a `Checkpointable`, to see the effect of its ``stages=``. If it has a limit,
            it is planned too, and the result says which skip connections are kept in place.
        repeats: timed runs of each stage.

    Raises:
        MeasureError: if the model cannot be cut; the message says what was tried and how to name stages by hand.
    """
    wrapped = model if isinstance(model, Checkpointable) else Checkpointable(model)
    wrapped.measure(*sample, repeats=repeats, **kwargs)
    profile = wrapped.profile
    rows = [FoundStage(0, stage.name, 0, 0, 0.0, 0.0) for stage in profile.prefix]
    for n, s in enumerate(profile.chain.stages, 1):
        forms = tuple(form.saved_bytes for form in s.forms)
        rows.append(FoundStage(n, s.name, s.output_bytes, s.saved_bytes, s.forward_time, s.backward_time, forms))
    if wrapped._specializations.request is not None:
        wrapped._specializations.ask(wrapped._specializations.request)
    kept = wrapped.kept_skips
    skips = [
        FoundSkip(s.first, s.last, s.nbytes, None if kept is None else n in kept) for n, s in enumerate(profile.skips)
    ]
    return FoundStages(wrapped.strategy, rows, skips)
