"""Checkpoints at equal distances: PyTorch's ``checkpoint_sequential``, and the square root of Chen et al.

Sources: the slides *Memory Saving Strategies for Deep Neural Network Training* (2021), where both are what rotor is
compared with; ``torch.utils.checkpoint.checkpoint_sequential`` for how L stages are cut; Chen, Xu, Zhang, Guestrin,
*Training deep nets with sublinear memory cost* (arXiv 1604.06174), section 4.2, for √L segments.

Interpretation: a segment counts stages, as in PyTorch, and not bytes or seconds. The last segment is kept and not
recomputed, as in PyTorch (and in Chen et al.'s cost, which counts one extra forward at most).
"""

from __future__ import annotations

import math

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Op, Sequence
from .choose import fastest
from .segments import periods


def cut_evenly(L: int, segments: int) -> list[int]:
    """Last stages of all segments but the last: each has ⌊L / segments⌋ stages, and the last one the rest."""
    size = L // segments
    return [size * part for part in range(1, segments)]


def periodic(chain: Chain, mem_limit: int, segments: int | None = None) -> Sequence:
    """``checkpoint_sequential`` with `segments` segments; None: the fastest count that fits."""
    L = len(chain)
    counts = range(1, L + 1) if segments is None else [whole_number(segments, "segments", 1, L)]
    return fastest(
        chain, mem_limit, "periodic", ((f"{s} segments", tuple(periods(L, cut_evenly(L, s)))) for s in counts)
    )


def chen(chain: Chain, mem_limit: int) -> Sequence:
    """⌈√L⌉ segments, whatever the limit: memory O(√L) for one forward more."""
    L = len(chain)
    segments = min(L, math.isqrt(L - 1) + 1)
    ops: tuple[Op, ...] = tuple(periods(L, cut_evenly(L, segments)))
    return fastest(chain, mem_limit, "chen", [(f"{segments} segments", ops)])
