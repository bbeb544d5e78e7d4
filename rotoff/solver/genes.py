"""Plans of chains with parameters: one row of numbers that the kernel `kernels.place` decodes into a steady step.

First the codes of the stages (`solver.plan_codes`); here the MOVE bit says that the value leaves, in its longest
absence. Then four numbers for each group: after which of its uses ``w`` leaves (bits), flags (its state leaves; its
gradient leaves before an update on the device; the host updates it), the stage after whose B the update is issued, and
a rank among updates issued there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..core.chain import Chain
from ..core.sequence import Op, OpKind, Sequence, Value
from .arrays import arrays
from .kernels.place import Placer
from .plan_codes import KINDS as MOVES_OF_STAGES

GENES, SLOTS = 4, 4
MASK, FLAGS, AT, RANK = range(GENES)
EVERYWHERE = (1 << 13) - 1  # every bit of a mask
STATE_LEAVES, GRADIENT_LEAVES, ON_HOST = 1, 2, 4
KINDS = (*MOVES_OF_STAGES, OpKind.U, OpKind.H)
_OF = {1: "w", 2: "g", 3: "o"}


@dataclass(frozen=True, eq=False)
class GroupArrays:
    """Bytes and seconds of the groups, as the kernel reads them; ``reads[reads_from[i]:reads_from[i + 1]]`` are those
    of stage i.
    """

    w: np.ndarray
    g: np.ndarray
    o: np.ndarray
    transient: np.ndarray
    update: np.ndarray
    host: np.ndarray
    first: np.ndarray
    last: np.ndarray
    reads_from: np.ndarray
    reads: np.ndarray
    slot: np.ndarray


@lru_cache(maxsize=8)
def group_arrays(chain: Chain) -> GroupArrays:
    """The groups of `chain` as arrays."""
    groups = chain.parameters
    reads: list[tuple[int, int, int]] = []
    for k, group in enumerate(groups):
        for slot, stage in enumerate(sorted(group.stages)):
            reads.append((stage, k, min(slot, SLOTS - 1)))
    reads.sort()
    starts = np.searchsorted([stage for stage, _, _ in reads], np.arange(len(chain) + 2))
    long, wide = np.int64, np.int32
    return GroupArrays(
        w=np.array([group.bytes for group in groups], dtype=long),
        g=np.array([group.grad_bytes for group in groups], dtype=long),
        o=np.array([group.state_bytes for group in groups], dtype=long),
        transient=np.array([group.update_transient_bytes for group in groups], dtype=long),
        update=np.array([group.update_time for group in groups]),
        host=np.array([-1.0 if group.host_update_time is None else group.host_update_time for group in groups]),
        first=np.array([min(group.stages) for group in groups], dtype=wide),
        last=np.array([max(group.stages) for group in groups], dtype=wide),
        reads_from=np.array(starts, dtype=wide),
        reads=np.array([k for _, k, _ in reads], dtype=wide),
        slot=np.array([slot for _, _, slot in reads], dtype=wide),
    )


def placer(
    chain: Chain, limit: int, visits: int, updates: str, host_limit: int | None = None, most_ops: int | None = None
) -> Placer:
    """Decoder of plans whose stages have `visits` columns of codes."""
    most = most_ops if most_ops is not None else 16 * len(chain) + 64
    host = -1 if host_limit is None else min(host_limit, 2**63 - 1)
    links = (chain.d2h_bandwidth, chain.h2d_bandwidth, chain.duplex, chain.bidirectional_shares)
    return Placer(arrays(chain), *links, limit, host, visits, most, group_arrays(chain), updates == "after")


def at_home(chain: Chain) -> np.ndarray:
    """Genes with which every group stays on the device and is updated there as soon as its gradient is whole."""
    genes = np.zeros((len(chain.parameters), GENES), dtype=np.int16)
    genes[:, AT] = [min(group.stages) for group in chain.parameters]
    return genes


def joined(codes: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """One plan of the stages' codes and the groups' genes."""
    return np.concatenate([codes.ravel(), genes.ravel()]).astype(np.int16)


def to_sequence(kernel: Placer, plan: np.ndarray) -> Sequence:
    """The sequence that `plan` stands for."""
    rows, rest = kernel.text(plan)
    ops = []
    for number, stage, form, of in rows:
        kind = KINDS[number]
        if kind is OpKind.F_ALL:
            ops.append(Op(OpKind.F_SEL if form else kind, stage, form))
        elif number < 4 or number >= len(MOVES_OF_STAGES):
            ops.append(Op(kind, stage))
        else:
            ops.append(Op(kind, stage, saved=of == 0, of=_OF.get(of, "")))
    return Sequence(tuple(ops), resident=[str(Value(False, k, _OF[of])) for of, k in rest])
