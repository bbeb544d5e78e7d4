"""STREAMING: nothing of a parameter stays on the device; each group comes in for its use, one operation ahead.

Sources: Rajbhandari et al., *ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning* (SC 2021),
section 5; PyTorch's FSDP2 with `CPUOffloadPolicy`, which brings parameters for a forward and a backward, offloads
gradients, and lets the optimizer run on the host.

Where interpreted: one process. The host updates where it can; where it cannot, states come in for it, and leave.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.sequence import Sequence
from ..placement import STREAMED, STREAMED_HOST_UPDATED
from .placed import best_of


def streaming(
    chain: Chain, mem_limit: int, updates: str = "after", ahead: int = 1, effort: bool | float = True
) -> Sequence:
    """Full streaming within `mem_limit` bytes, under the best plan for the activations in what it leaves.

    Args:
        updates: "after" the backward, as there, or "during" it. ahead: operations between a prefetch and its use.
        effort: `refine` of `rotoff.solve`, for the activations.

    Raises:
        InfeasibleError: if that does not fit. OptionError: if there is nothing to place.
    """
    places = [STREAMED if group.host_update_time is None else STREAMED_HOST_UPDATED for group in chain.parameters]
    return best_of("streaming", chain, mem_limit, {"all streamed": places}, updates, effort, ahead=(ahead,))
