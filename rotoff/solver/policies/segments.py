"""Persistent recompute: a checkpoint stays until its backward, so a tree of segments determines all operations; and the
policies whose segments have equal lengths, PyTorch's ``checkpoint_sequential`` and the square root of Chen et al.

Segment i..j begins with its input and δ_j held and ends with δ_{i-1}. It runs in one of three ways: ``F_all i``, then
segment i+1..j, then ``B i``; or ``F_ck i``, ``F_none`` i+1..k, then segment k+1..j (whose last ``B`` drops a_k), then
segment i..k; or, for i = j, ``F_all i``, ``B i``.

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
from ...core.sequence import B, F_all, F_ck, F_none, Op, Sequence
from .choose import fastest


def sweep(i: int, k: int) -> list[Op]:
    """Compute a_k from the input of i; only these two are kept: ``F_ck i``, ``F_none`` i+1..k."""
    return [F_ck(i), *(F_none(q) for q in range(i + 1, k + 1))]


def keep(i: int, j: int) -> list[Op]:
    """Forwards that keep everything of stages i..j, then their backwards."""
    return [*(F_all(q) for q in range(i, j + 1)), *(B(q) for q in range(j, i - 1, -1))]


def one_by_one(i: int, j: int) -> list[Op]:
    """Segment i..j from its input alone, with nothing kept in between: about (j − i + 1)² / 2 forwards."""
    made: list[Op] = []
    for q in range(j, i - 1, -1):
        if q > i:
            made += sweep(i, q - 1)
        made += [F_all(q), B(q)]
    return made


def periods(L: int, ends: list[int]) -> list[Op]:
    """Segments that end at `ends` (rising, below L) keep their outputs only; the stages after them are kept whole.

    One sweep forward and, for each segment, one more forward: ``torch.utils.checkpoint.checkpoint_sequential``.
    """
    starts = [1, *(end + 1 for end in ends)]
    made: list[Op] = []
    for start, end in zip(starts, ends, strict=False):
        made += sweep(start, end)
    made += keep(starts[-1], L)
    for start, end in zip(reversed(starts[:-1]), reversed(ends), strict=True):
        made += keep(start, end)
    return made


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
