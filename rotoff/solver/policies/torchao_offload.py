"""TORCHAO: torchao's optimizer on the host (`CPUOffloadOptimizer`); parameters stay on the device.

Source: torchao, `torchao/optim/cpu_offload.py`. Each gradient is copied out as soon as it is whole, on a stream of its
own. After the backward, gradient by gradient in that order, the host updates and the parameters are copied back.

Interpretation: with ``offload_gradients=False``, its default, gradients stay on the device until the step is over.
The parameters' bytes are not reused meanwhile; see `zero_offload`.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.sequence import Op, OpKind, Sequence
from ..placement import HOST_UPDATED
from .placed import best_of


def gradients_stay(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """`ops` with every gradient kept on the device to the end of the step."""
    late = tuple(op for op in ops if op.kind is OpKind.FREE and op.of == "g")
    return (*(op for op in ops if op not in late), *late)


def torchao_offload(
    chain: Chain, mem_limit: int, updates: str = "after", offload_gradients: bool = False, effort: bool | float = True
) -> Sequence:
    """torchao's offloaded optimizer within `mem_limit` bytes, with the best plan for the activations in the remaining
    bytes.

    Args:
        updates: "after" the backward, as in torchao, or "during" it. offload_gradients: whether gradients leave the
            device at once.
        effort: `refine` of `rotoff.solve`, for the activations.
    """
    placements = {"all updated on the host": [HOST_UPDATED] * len(chain.parameters)}
    shape = None if offload_gradients else gradients_stay
    return best_of("torchao-offload", chain, mem_limit, placements, updates, effort, shape)
