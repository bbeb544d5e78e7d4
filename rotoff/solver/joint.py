"""Recompute and offload together: proposals for the joint mode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..chain import Chain
from . import remat
from .plan import MOVE


def proposals(chain: Chain, limit: int, mem_slots: int) -> Iterator[tuple[str, np.ndarray]]:
    """Recompute plans made for more memory than there is, whose values then move where they must."""
    for inflation in (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0):
        _, codes = remat.solve_slots(chain, int(limit * inflation), 4 * mem_slots, "sums")
        if codes is not None:
            moved = codes.copy()
            moved[1:] |= MOVE
            yield f"remat-{inflation}-moved", moved
