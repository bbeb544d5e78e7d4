"""Finds the stages with long computations for their bytes: the CONV layers in papers on convolutional networks."""

from __future__ import annotations

from typing import Any

from ...core.chain import Chain
from ...core.modes import as_tuple, whole_number
from ..arrays import arrays


def heavy_stages(chain: Chain) -> list[int]:
    """Stages whose name contains "conv"; if there are none, those whose u_F / |ā_i| is at least the chain's average."""
    named = [i for i, stage in enumerate(chain.stages, start=1) if "conv" in stage.name.lower()]
    if named:
        return named
    c = arrays(chain)
    time, size = float(c.u_F.sum()), int(c.saved[:, 0].sum())
    return [i for i in range(1, len(chain) + 1) if c.u_F[i] * size >= time * int(c.saved[i, 0])]


def check_stages(chain: Chain, stages: Any, option: str) -> list[int]:
    """`stages` as a rising list of stages of the chain.

    Raises:
        OptionError: for anything but stages of the chain; `option` is the argument's name for the message.
    """
    return sorted({whole_number(i, f"a stage of {option}", 1, len(chain)) for i in as_tuple(stages)})
