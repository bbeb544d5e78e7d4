"""BY-HAND: the best of some 70 placements that a person would try, as a yardstick for a planner of parameters.

The first r groups are resident; the next z keep their parameters on the device, and the host has their states and updates them; all
others are streamed one operation ahead, or two. r and z go over a grid of elevenths. Where the host cannot update, states come in for it.
"""

from __future__ import annotations

from ...chain import Chain
from ...sequence import Sequence
from ..placement import HOST_UPDATED, RESIDENT, STATE_STREAMED, STREAMED, STREAMED_HOST_UPDATED, Place
from .placed import best_of

STEPS = 11  # so that there are 78 pairs of r and z


def by_hand(chain: Chain, mem_limit: int, updates: str = "during", effort: bool | float = True) -> Sequence:
    """The best placement by hand within `mem_limit` bytes, under the best plan for the activations in what it leaves.

    Args:
        updates: "during" or "after". effort: `refine` of `rotoff.solve`, for the activations, once the placement is chosen.

    Raises:
        InfeasibleError: where no placement fits. OptionError: where there is nothing to place.
    """
    K = len(chain.parameters)
    counts = sorted({round(K * n / STEPS) for n in range(STEPS + 1)})
    placements = {
        f"{r} resident, {z} updated on the host": _places(chain, r, z) for r in counts for z in counts if r + z <= K
    }
    return best_of("by-hand", chain, mem_limit, placements, updates, effort, ahead=(1, 2))


def _places(chain: Chain, r: int, z: int) -> list[Place]:
    on_host = [group.host_update_time is not None or not group.grad_bytes for group in chain.parameters]
    moved = [(HOST_UPDATED, STREAMED_HOST_UPDATED) if can else (STATE_STREAMED, STREAMED) for can in on_host]
    return [RESIDENT if k < r else spots[0] if k < r + z else spots[1] for k, spots in enumerate(moved)]
