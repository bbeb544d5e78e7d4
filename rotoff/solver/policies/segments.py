"""Operations of persistent recompute: a checkpoint stays until its backward, so a tree of segments determines all.

Segment i..j begins with its input and δ_j held and ends with δ_{i-1}. It runs in one of three ways: ``F_all i``, then
segment i+1..j, then ``B i``; or ``F_ck i``, ``F_none`` i+1..k, then segment k+1..j (whose last ``B`` drops a_k), then
segment i..k; or, for i = j, ``F_all i``, ``B i``.
"""

from __future__ import annotations

from ...core.sequence import B, F_all, F_ck, F_none, Op


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
