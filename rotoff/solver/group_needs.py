"""What parameters, gradients and optimizer states need on the device, whatever the plan."""

from __future__ import annotations

import numpy as np

from ..core.chain import Chain


def own_needs(chain: Chain, updates: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Bytes of parameters that every forward and every backward (by stage, entry 0 is 0) needs, and the largest need of
    a ``U``.

    A gradient that is not whole stays. ``U`` counts where no ``H`` is possible, at the best moment that `updates`
    allows.
    """
    L = len(chain)
    forward, backward = np.zeros(L + 1, dtype=np.int64), np.zeros(L + 1, dtype=np.int64)
    for group in chain.parameters:
        for i in group.stages:
            forward[i] += group.bytes
            backward[i] += group.bytes
        backward[min(group.stages) : max(group.stages) + 1] += group.grad_bytes
    held, update = _held_between(chain), 0
    for k, stage in update_moments(chain, updates).items():
        group = chain.group(k)
        if group.host_update_time is None:
            values = group.bytes + group.grad_bytes + group.state_bytes + group.update_transient_bytes
            update = max(update, chain.input_bytes + chain.output_bytes(L) + int(held[stage - 1]) + values)
    return forward, backward, update


def update_moments(chain: Chain, updates: str) -> dict[int, int]:
    """The stage after whose B each group is updated, by its number, so that least is held beside it."""
    held = _held_between(chain)
    return {
        k: 1 + min(range(1 if updates == "after" else min(group.stages)), key=lambda j: int(held[j]))
        for k, group in enumerate(chain.parameters, start=1)
        if group.grad_bytes
    }


def _held_between(chain: Chain) -> np.ndarray:
    """[j]: bytes of δ_j and of the gradients that are not whole between B j+1 and B j."""
    held = np.array([chain.grad_bytes(j) for j in range(len(chain) + 1)])
    for group in chain.parameters:
        held[min(group.stages) : max(group.stages)] += group.grad_bytes
    return held
