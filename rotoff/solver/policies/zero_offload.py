"""ZERO-OFFLOAD: parameters stay on the device; gradients go to the host, which holds the states and runs the updates.

Source: Ren et al., *ZeRO-Offload: Democratizing Billion-Scale Model Training* (USENIX ATC 2021), section 4: gradients
leave during the backward, the host updates once all of them are there, and the parameters come back before the next
forward.

Interpretation: one process, so nothing is partitioned, and no update is delayed by a step. That system does not reuse
the parameters' bytes between their last backward and their return, so nothing else is planned there.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.sequence import Op, OpKind, Sequence, wait
from ..placement import HOST_UPDATED
from .placed import best_of


def together(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """`ops` with all parameters copied back after the last update, and a forward that waits for all of them."""
    back = [n for n, op in enumerate(ops) if op.kind is OpKind.PREFETCH and op.of == "w"]
    late = [ops[n] for n in back]
    waits = {wait(op.value) for op in late}
    others = [op for n, op in enumerate(ops) if n not in set(back) and op not in waits]
    return (*sorted(waits, key=lambda op: op.stage), *others, *sorted(late, key=lambda op: op.stage))


def zero_offload(chain: Chain, mem_limit: int, updates: str = "after", effort: bool | float = True) -> Sequence:
    """ZeRO-Offload within `mem_limit` bytes, with the best plan for the activations in the remaining bytes.

    Args:
        updates: "after" the backward, as in the paper, or "during" it. effort: `refine` of `rotoff.solve`, for the
            activations.
    """
    placements = {"all updated on the host": [HOST_UPDATED] * len(chain.parameters)}
    return best_of("zero-offload", chain, mem_limit, placements, updates, effort, together)
