"""Plans of chains with parameters: one row of numbers that the kernel `kernels.place` decodes into a steady step.

First come the codes of the stages (`solver.plan_codes`); here the MOVE bit means that the value is offloaded during its
longest absence. Then four numbers follow for each group: a mask of the uses after which ``w`` leaves, flags (its state
leaves; its gradient leaves before an update on the device; the host updates it; ``w`` and ``g`` leave even while groups
of the same stage are updated), the stage after whose B the update is issued, and a rank among updates issued there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..core.chain import Chain
from ..core.sequence import Sequence, Value
from .arrays import arrays
from .kernels.place import Placer
from .plan_codes import OF, to_ops

GENES, SLOTS = 4, 4
MASK, FLAGS, AT, RANK = range(GENES)
EVERYWHERE = (1 << 13) - 1  # every bit of a mask
STATE_LEAVES, GRADIENT_LEAVES, ON_HOST, STEPS_ASIDE = 1, 2, 4, 8


# Bytes and seconds of a group, as `kernels.cycle` reads them.
GROUP = np.dtype(
    [(name, np.int64) for name in ("w", "g", "o", "transient")]
    + [("update", np.float64), ("host", np.float64), ("first", np.int32), ("last", np.int32)]
)


@lru_cache(maxsize=8)
def group_arrays(chain: Chain) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The groups of `chain` as rows of `GROUP`, and the groups that each stage reads: (first index of each stage, group
    of each index, place of the stage among the group's stages).
    """
    reads = sorted(
        (stage, k, min(slot, SLOTS - 1))
        for k, group in enumerate(chain.parameters)
        for slot, stage in enumerate(sorted(group.stages))
    )
    starts = np.searchsorted([stage for stage, _, _ in reads], np.arange(len(chain) + 2))
    rows = []
    for group in chain.parameters:
        sizes = group.bytes, group.grad_bytes, group.state_bytes, group.update_transient_bytes
        host = -1.0 if group.host_update_time is None else group.host_update_time
        rows.append((*sizes, group.update_time, host, min(group.stages), max(group.stages)))
    _, read, slots = np.array(reads, dtype=np.int32).T
    return np.array(rows, dtype=GROUP), (starts.astype(np.int32), read, slots)


def placer(chain: Chain, limit: int, visits: int, updates: str, host_limit: int | None = None) -> Placer:
    """A decoder for plans with `visits` columns of codes."""
    most = 16 * len(chain) + 64
    return Placer(chain, arrays(chain), limit, host_limit, visits, most, *group_arrays(chain), updates == "after")


def at_home(chain: Chain) -> np.ndarray:
    """Genes that keep every group on the device and update it there as soon as its gradient is whole."""
    genes = np.zeros((len(chain.parameters), GENES), dtype=np.int16)
    genes[:, AT] = [min(group.stages) for group in chain.parameters]
    return genes


def joined(codes: np.ndarray, genes: np.ndarray) -> np.ndarray:
    """One plan of the stages' codes and the groups' genes."""
    return np.concatenate([codes.ravel(), genes.ravel()]).astype(np.int16)


def to_sequence(kernel: Placer, plan: np.ndarray) -> Sequence:
    """Decode `plan` into a sequence."""
    rows, rest = kernel.text(plan)
    return Sequence(to_ops(rows), resident=[str(Value(False, k, OF[of])) for of, k in rest])
