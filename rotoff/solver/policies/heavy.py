"""Which stages are long computations for their bytes: what papers on convolutional networks call the CONV layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.chain import Chain
from ...errors import OptionError
from ..arrays import arrays


def heavy_stages(chain: Chain) -> list[int]:
    """Stages named after a convolution, where there are any; else those whose u_F is above the chain's average for
    |ā_i|."""
    named = [i for i, stage in enumerate(chain.stages, start=1) if "conv" in stage.name.lower()]
    if named:
        return named
    c = arrays(chain)
    time, size = float(c.u_F.sum()), int(c.saved[:, 0].sum())
    return [i for i in range(1, len(chain) + 1) if c.u_F[i] * size >= time * int(c.saved[i, 0])]


def check_stages(chain: Chain, stages: Any, option: str) -> list[int]:
    """`stages` as a rising list of stages of the chain.

    Raises:
        OptionError: if it is none; `option` is what the caller calls it.
    """
    L = len(chain)
    numbers = list(stages) if isinstance(stages, Iterable) and not isinstance(stages, str) else [stages]
    for i in numbers:
        if isinstance(i, bool) or not isinstance(i, int) or not 1 <= i <= L:
            raise OptionError(f"{option} has {i!r}; give stages, whole numbers from 1 to {L}")
    return sorted(set(numbers))
