"""Finds the stages with long computations for their bytes: the CONV layers in papers on convolutional networks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.chain import Chain
from ...errors import OptionError
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
    L = len(chain)
    numbers = list(stages) if isinstance(stages, Iterable) and not isinstance(stages, str) else [stages]
    for i in numbers:
        if isinstance(i, bool) or not isinstance(i, int) or not 1 <= i <= L:
            raise OptionError(f"{option} has {i!r}; give stages, whole numbers from 1 to {L}")
    return sorted(set(numbers))
