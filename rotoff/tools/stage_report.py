"""The stages of a model, as a table: ``print(rotoff.stages(model, sample))``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checkpointable import Checkpointable
from ..core.chain import Chain
from ..report.chain_table import chain_table


@dataclass(frozen=True)
class FoundStages:
    """The stages of a model; prints as a table.

    strategy: how they were found, as text. chain: their bytes and seconds.
    """

    strategy: str
    chain: Chain

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        return {**self.chain.to_dict(), "strategy": self.strategy}

    def __str__(self) -> str:
        return f"{self.strategy}\n{chain_table(self.chain)}"


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
    return FoundStages(wrapped.strategy, wrapped.profile.chain)
