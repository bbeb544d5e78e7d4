"""Plans as tables of codes, one for each visit of each stage; `kernels.decode` decodes them on exact bytes.

``codes[q, v]`` governs the v-th time that a forward of stage q runs (v from 0; the last column serves later visits
too):

- ``code >> 4`` is 0 for ``F_ck q``, 1 for ``F_all q``, 1 + k for ``F_sel q k``;
- bit 0 (MOVE): the value made may be offloaded and freed (only if it has to make room);
- bit 1 (DROP): the input of q is dropped right after (``F_ck`` becomes ``F_none`` if the input is held as ``a``);
- bit 2 (APART, with MOVE, for an ā): B q+1 takes a_q, made again for it, while ā_q waits on the host;
- bit 3 (EARLY, with MOVE, for an ā): the same from the start, a_q is made right after ā_q, which leaves at once.

Row 0 is not used. Backwards need no code: before ``B i``, missing values are recomputed from the nearest earlier value.
The papers' persistent recompute trees are such tables. Tables can also express moves in the backward phase, inputs
dropped under a kept ā, and checkpoints dropped and made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import starmap

import numpy as np

from ..core.chain import Chain, check_chain
from ..core.sequence import TRANSFERS, Op, OpKind, Sequence, o, w
from ..core.steady_step import group_bytes
from .arrays import arrays
from .kernels.plan import Evaluator
from .placement import RESIDENT, place

MOVE, DROP, APART, EARLY = 1, 2, 4, 8
CK, ALL = 0, 16  # F_sel k is ALL + 16 * k
_MOVES = (OpKind.OFFLOAD, OpKind.FREE, OpKind.PREFETCH, OpKind.WAIT, OpKind.DROP)
KINDS = (OpKind.F_ALL, OpKind.F_CK, OpKind.F_NONE, OpKind.B, *_MOVES, OpKind.U, OpKind.H)
OF = {1: "w", 2: "g", 3: "o"}


def select(form: int) -> int:
    """The code of F_all (form 0) or F_sel."""
    return ALL * (1 + form)


def without_forms(chain: Chain) -> Chain:
    """The chain without smaller forms of its stages."""
    return replace(chain, stages=tuple(replace(stage, forms=()) for stage in chain.stages))


def empty(chain: Chain, visits: int = 4) -> np.ndarray:
    """The plan that keeps everything: F_all at every visit."""
    codes = np.full((len(chain) + 1, visits), ALL, dtype=np.int16)
    codes[0] = 0
    return codes


def moved(codes: np.ndarray) -> np.ndarray:
    """The plan with every value free to move."""
    codes = codes.copy()
    codes[1:] |= MOVE
    return codes


def from_forwards(chain: Chain, forwards: Iterable[tuple[int, int]]) -> np.ndarray:
    """The plan whose forwards, in program order, are the pairs (stage, code); codes repeat after a stage's last
    visit.
    """
    rows: list[list[int]] = [[] for _ in range(len(chain) + 1)]
    for stage, code in forwards:
        rows[stage].append(code)
    codes = empty(chain, max(4, *map(len, rows)))
    for stage, row in enumerate(rows):
        if row:
            codes[stage, : len(row)] = row
    return codes


def in_columns(codes: np.ndarray, visits: int) -> np.ndarray:
    """The plan in a table of `visits` columns; codes of later visits are lost."""
    return codes.take(np.minimum(np.arange(visits), codes.shape[1] - 1), axis=1)


def evaluator(
    chain: Chain, mem_limit: int, visits: int, host_limit: int | None = None, most_ops: int | None = None
) -> Evaluator:
    """A decoder for plans with `visits` columns at a limit of `mem_limit` bytes."""
    most = most_ops if most_ops is not None else 16 * len(chain) + 64
    return Evaluator(chain, arrays(chain), mem_limit, host_limit, visits, most)


def to_ops(rows: Iterable[tuple[int, int, int, int]]) -> tuple[Op, ...]:
    """The operations of decoded rows (kind, stage, form, of). of: -1 for a, 0 for ā, otherwise as in `OF`."""
    return tuple(starmap(_op, rows))


@lru_cache(maxsize=2**14)  # most plans of a chain have the same ones
def _op(number: int, stage: int, form: int, of: int) -> Op:
    kind = KINDS[number]
    if kind in TRANSFERS:
        return Op(kind, stage, saved=of == 0, of=OF.get(of, ""))
    return Op(OpKind.F_SEL if form and kind is OpKind.F_ALL else kind, stage, form if kind is OpKind.F_ALL else 0)


def with_residents(chain: Chain, ops: Iterable[Op]) -> Sequence:
    """`ops` as a step that follows itself: resident are the parameters and states whose last move brings them to the
    device, and those that never move and that no ``H`` updates there."""
    ops, moved = tuple(ops), (OpKind.PREFETCH, OpKind.FREE, OpKind.DROP)
    last = {o(op.stage): OpKind.FREE for op in ops if op.kind is OpKind.H}
    last |= {op.value: op.kind for op in ops if op.kind in moved and op.of in ("w", "o")}
    every = (v for k in range(1, len(chain.parameters) + 1) for v in (w(k), o(k)) if group_bytes(chain, v))
    return Sequence(ops, resident=[str(v) for v in every if last.get(v, OpKind.PREFETCH) is OpKind.PREFETCH])


def keep_all(chain: Chain, updates: str = "during") -> Sequence:
    """The sequence of plain PyTorch, which keeps everything and moves nothing: ``F_all`` 1..L, ``B`` L..1.

    Parameters are resident, and the device updates each group. updates: "during" the step, as soon as the group's
    gradient is whole, or "after" ``B 1``.

    Raises:
        ChainError: if `chain` is not a chain.
    """
    check_chain(chain)
    L = len(chain)
    forwards = [Op(OpKind.F_ALL, i) for i in range(1, L + 1)]
    activations = (*forwards, *(Op(OpKind.B, i) for i in range(L, 0, -1)))
    return replace(place(chain, activations, [RESIDENT] * len(chain.parameters), updates), mode="keep-all")
