"""BLOCK-SWAP: the last n layers are streamed; all others are resident.

Source: block swapping in trainers of image and video models (``--blocks_to_swap`` of kohya-ss/sd-scripts and
musubi-tuner): "the number of blocks to swap" between the device and the host, each copied in while the one before
computes.

Interpretation: a layer is a group of parameters; its state moves with it, and the device updates. The number is the
user's there; here it is the best one.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Sequence
from ..placement import RESIDENT, STREAMED
from .placed import best_of


def block_swap(
    chain: Chain, mem_limit: int, updates: str = "during", blocks: int | None = None, effort: bool | float = True
) -> Sequence:
    """Block swapping within `mem_limit` bytes, with the best plan for the activations in the remaining bytes.

    Args:
        updates: "during" or "after". blocks: how many groups are swapped; None for the best number. effort: `refine` of
            `rotoff.solve`, for the activations.
    """
    K = len(chain.parameters)
    counts = range(K + 1) if blocks is None else (whole_number(blocks, "blocks", 0, K),)
    placements = {f"{n} of {K} swapped": [RESIDENT] * (K - n) + [STREAMED] * n for n in counts}
    return best_of("block-swap", chain, mem_limit, placements, updates, effort)
