"""BY-HAND: the best of about 70 placements that a person would try, as a baseline for planners of parameters.

The first r groups are resident; the next z keep their parameters on the device, and the host has their states and
updates them; all others are streamed one operation ahead, or two. r and z run over a grid of tenths (r over all numbers
if z is 0), then over the neighbours of the best as long as one of them is better. If the host cannot update a group,
its states are copied in for the update.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from ...core.chain import Chain
from ...core.sequence import Sequence
from ..placement import HOST_UPDATED, RESIDENT, STATE_STREAMED, STREAMED, STREAMED_HOST_UPDATED, Place
from .placed import Placed, best_of

STEPS = 10  # so that there are 66 pairs of r and z


def by_hand(chain: Chain, mem_limit: int, updates: str = "during", effort: bool | float = True) -> Sequence:
    """The best placement by hand within `mem_limit` bytes, with the best plan for the activations in the remaining
    bytes.

    Args:
        updates: "during" or "after". effort: `refine` of `rotoff.solve`, for the activations, once the placement is
            chosen.
    """
    K = len(chain.parameters)
    counts = sorted({round(K * n / STEPS) for n in range(STEPS + 1)})
    grid = sorted({(r, z) for r in counts for z in counts if r + z <= K} | {(r, 0) for r in range(K + 1)})
    quick, found = Placed(chain, updates, refine=False), dict[tuple[int, int], float]()

    def try_all(pairs: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        for pair in pairs:
            made = quick.within(mem_limit, _places(chain, *pair))
            if made is not None:
                found[pair] = made.meta["makespan"]
        return min(found, key=lambda pair: found[pair], default=None)

    best, centre = try_all(grid), None
    while best is not None and best != centre:
        centre = best
        near = product(range(best[0] - 2, best[0] + 3), range(best[1] - 1, best[1] + 2))
        best = try_all(pair for pair in near if min(pair) >= 0 and sum(pair) <= K and pair not in found)
    chosen = grid if best is None else [best]
    placements = {f"{r} resident, {z} updated on the host": _places(chain, r, z) for r, z in chosen}
    return best_of("by-hand", chain, mem_limit, placements, updates, effort, ahead=(1, 2))


def _places(chain: Chain, r: int, z: int) -> list[Place]:
    on_host = [group.host_update_time is not None or not group.grad_bytes for group in chain.parameters]
    moved = [(HOST_UPDATED, STREAMED_HOST_UPDATED) if can else (STATE_STREAMED, STREAMED) for can in on_host]
    return [RESIDENT if k < r else spots[0] if k < r + z else spots[1] for k, spots in enumerate(moved)]
