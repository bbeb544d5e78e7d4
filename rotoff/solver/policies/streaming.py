"""STREAMING: no parameters stay on the device; each group is copied in for each use, one operation ahead.

Sources: Rajbhandari et al., *ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning* (SC 2021),
section 5; PyTorch's FSDP2 with `CPUOffloadPolicy`, which copies parameters in for a forward and a backward, offloads
gradients, and runs the optimizer on the host.

Interpretation: one process. The host updates the groups that it can; for the others, states are copied in and out.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.sequence import Sequence
from ..placement import STREAMED, STREAMED_HOST_UPDATED
from .placed import best_of


def streaming(
    chain: Chain, mem_limit: int, updates: str = "after", ahead: int = 1, effort: bool | float = True
) -> Sequence:
    """Full streaming within `mem_limit` bytes, with the best plan for the activations in the remaining bytes.

    Args:
        updates: "after" the backward, as in the sources, or "during" it. ahead: operations from a prefetch to its use.
        effort: `refine` of `rotoff.solve`, for the activations.
    """
    places = [STREAMED if group.host_update_time is None else STREAMED_HOST_UPDATED for group in chain.parameters]
    return best_of("streaming", chain, mem_limit, {"all streamed": places}, updates, effort, ahead=(ahead,))
