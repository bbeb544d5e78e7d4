"""OVERLAP: offloads each layer's ā with a simple overlap: the next forward hides the copy out, the previous backward
the copy back.

Source: Hascoet, Zhuang, Febvre, Ariki, Takiguchi, *Reducing the Memory Cost of Training Convolutional Neural Networks
by CPU Offloading* (JSEA 2019), section 4.2, algorithms 1 and 2. Forward: z_i leaves once layer i has made it; its
buffer "must await both the data transfer to CPU and the next layer computation". Backward: the copy back of what layer
i needs starts "with the beginning of the backpropagation through" layer i+1, and layer i awaits it. So at most one copy
is in flight with each operation, and the overhead is Σ max(0, copy − computation) at most.

Interpretation:

- ā_i leaves (z_i is in it); ``free abar i`` follows ``F_all i+1``. ``B i`` needs ā_i and its input in ā_{i−1}, so the
  value that the paper copies in during the backward of layer i+1 is ā_{i−1} here.
- "Different subsets of hidden layers" are searched "extensively" in the paper. Here: the first k stages for every k,
  and for every k the k stages of most forward time per byte; the fastest that fits.
- In `operations`, `parallel` false is the ablation of its table 2: each copy is waited for at once.

The pinned buffers, allocated beforehand, are the runtime's (one slab for each plan). The invertible BatchNorm is in
`benchmarks/papers/invertible_norm.py`. Copies in half precision are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ...core.chain import Chain
from ...core.sequence import B, F_all, Op, Sequence, abar, free, offload, prefetch, wait
from ..arrays import arrays
from .choose import fastest


def operations(L: int, layers: Iterable[int], parallel: bool = True) -> tuple[Op, ...]:
    """Algorithms 1 and 2 over L stages, with ā of `layers` (below L) moved."""
    out, made = frozenset(layers), []
    for i in range(1, L + 1):
        made.append(F_all(i))
        if i - 1 in out:
            if not parallel:
                made.append(offload(abar(i - 1)))
            made.append(free(abar(i - 1)))
        if i in out and parallel:
            made.append(offload(abar(i)))
    if L - 1 in out:  # the input of B L, which follows F L at once
        made += [prefetch(abar(L - 1)), wait(abar(L - 1))]
    for i in range(L, 0, -1):
        due = i - 2
        if due in out and parallel:
            made.append(prefetch(abar(due)))
        made.append(B(i))
        if due in out:
            made += [wait(abar(due))] if parallel else [prefetch(abar(due)), wait(abar(due))]
    return tuple(made)


def overlap(chain: Chain, mem_limit: int) -> Sequence:
    """The paper's system within `mem_limit` bytes, with the fastest of the subsets above."""
    made = ((_name(out), operations(len(chain), out)) for out in subsets(chain))
    return fastest(chain, mem_limit, "overlap", made)


def subsets(chain: Chain) -> Iterator[list[int]]:
    """The empty set; the first k stages; the k stages with the most forward time per byte."""
    L, c = len(chain), arrays(chain)
    rank = np.argsort(-c.u_F[1:L] / np.maximum(c.saved[1:L, 0], 1), kind="stable") + 1
    yield []
    for k in range(1, L):
        first = list(range(1, k + 1))
        yield first
        if (dense := sorted(rank[:k].tolist())) != first:
            yield dense


def _name(out: list[int]) -> str:
    return f"{len(out)} offloaded" + (f", the last of them {out[-1]}" if out else "")
