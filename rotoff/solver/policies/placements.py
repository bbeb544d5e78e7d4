"""Policies that place parameters by rule, each with the best plan for the activations in the remaining bytes.

All take `updates`, "during" the step or "after" the backward, and `effort`: `refine` of `rotoff.solve`, for the
activations. They assume one process, so nothing is partitioned and no update is delayed by a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Op, OpKind, Sequence, wait
from ..placement import HOST_UPDATED, RESIDENT, STATE_STREAMED, STREAMED, STREAMED_HOST_UPDATED, Place
from .placed import Placed, best_of

STEPS = 10  # of `by_hand`, so that there are 66 pairs of r and z


def zero_offload(chain: Chain, mem_limit: int, updates: str = "after", effort: bool | float = True) -> Sequence:
    """ZeRO-Offload: parameters stay on the device; the host holds the states and runs the updates.

    Source: Ren et al., *ZeRO-Offload: Democratizing Billion-Scale Model Training* (USENIX ATC 2021), section 4:
    gradients leave during the backward, the host updates once all of them are there, and the parameters come back
    before the next forward. That system does not reuse the parameters' bytes between their last backward and their
    return, so nothing else is planned there.
    """
    placements = {"all updated on the host": [HOST_UPDATED] * len(chain.parameters)}
    return best_of("zero-offload", chain, mem_limit, placements, updates, effort, together)


def together(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """`ops` with all parameters copied back after the last update, and a forward that waits for all of them."""
    back = [n for n, op in enumerate(ops) if op.kind is OpKind.PREFETCH and op.of == "w"]
    late = [ops[n] for n in back]
    waits = {wait(op.value) for op in late}
    others = [op for n, op in enumerate(ops) if n not in set(back) and op not in waits]
    return (*sorted(waits, key=lambda op: op.stage), *others, *sorted(late, key=lambda op: op.stage))


def torchao_offload(
    chain: Chain, mem_limit: int, updates: str = "after", offload_gradients: bool = False, effort: bool | float = True
) -> Sequence:
    """torchao's optimizer on the host (`CPUOffloadOptimizer`); parameters stay on the device.

    Source: torchao, `torchao/optim/cpu_offload.py`. Each gradient is copied out as soon as it is whole, on a stream of
    its own. After the backward, gradient by gradient in that order, the host updates and the parameters are copied
    back. The parameters' bytes are not reused meanwhile; see `zero_offload`.

    Args:
        offload_gradients: whether gradients leave the device at once; by default they stay until the step is over.
    """
    placements = {"all updated on the host": [HOST_UPDATED] * len(chain.parameters)}
    shape = None if offload_gradients else gradients_stay
    return best_of("torchao-offload", chain, mem_limit, placements, updates, effort, shape)


def gradients_stay(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """`ops` with every gradient kept on the device to the end of the step."""
    late = tuple(op for op in ops if op.kind is OpKind.FREE and op.of == "g")
    return (*(op for op in ops if op not in late), *late)


def streaming(
    chain: Chain, mem_limit: int, updates: str = "after", ahead: int = 1, effort: bool | float = True
) -> Sequence:
    """No parameters stay on the device; each group is copied in for each use, `ahead` operations before it.

    Sources: Rajbhandari et al., *ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning* (SC
    2021), section 5; PyTorch's FSDP2 with `CPUOffloadPolicy`, which offloads gradients, and runs the optimizer on the
    host. Here the host updates the groups that it can; for the others, states are copied in and out.
    """
    places = [STREAMED if group.host_update_time is None else STREAMED_HOST_UPDATED for group in chain.parameters]
    return best_of("streaming", chain, mem_limit, {"all streamed": places}, updates, effort, ahead=(ahead,))


def block_swap(
    chain: Chain, mem_limit: int, updates: str = "during", blocks: int | None = None, effort: bool | float = True
) -> Sequence:
    """The last `blocks` groups are streamed with their states, and the device updates; all others are resident.

    Source: block swapping in trainers of image and video models (``--blocks_to_swap`` of kohya-ss/sd-scripts and
    musubi-tuner), where the user gives the number; None is the best one.
    """
    K = len(chain.parameters)
    counts = range(K + 1) if blocks is None else (whole_number(blocks, "blocks", 0, K),)
    placements = {f"{n} of {K} swapped": [RESIDENT] * (K - n) + [STREAMED] * n for n in counts}
    return best_of("block-swap", chain, mem_limit, placements, updates, effort)


def by_hand(chain: Chain, mem_limit: int, updates: str = "during", effort: bool | float = True) -> Sequence:
    """The best of about 70 placements that a person would try, as a baseline for planners of parameters.

    The first r groups are resident; the next z keep their parameters on the device, and the host has their states and
    updates them; all others are streamed one operation ahead, or two. r and z run over a grid of tenths (r over all
    numbers if z is 0), then over the neighbours of the best as long as one of them is better. If the host cannot update
    a group, its states are copied in for the update. Placements are compared without refinement.
    """
    K = len(chain.parameters)
    counts = sorted({round(K * n / STEPS) for n in range(STEPS + 1)})
    grid = sorted({(r, z) for r in counts for z in counts if r + z <= K} | {(r, 0) for r in range(K + 1)})
    quick, found = Placed(chain, updates, refine=False), dict[tuple[int, int], float]()

    def try_all(pairs: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        for pair in pairs:
            made = quick.within(mem_limit, _places(chain, *pair))
            if made is not None:
                found[pair] = made.meta["makespan"]
        return min(found, key=lambda pair: found[pair], default=None)

    best, centre = try_all(grid), None
    while best is not None and best != centre:
        centre = best
        near = product(range(best[0] - 2, best[0] + 3), range(best[1] - 1, best[1] + 2))
        best = try_all(pair for pair in near if min(pair) >= 0 and sum(pair) <= K and pair not in found)
    chosen = grid if best is None else [best]
    placements = {f"{r} resident, {z} updated on the host": _places(chain, r, z) for r, z in chosen}
    return best_of("by-hand", chain, mem_limit, placements, updates, effort, ahead=(1, 2))


def _places(chain: Chain, r: int, z: int) -> list[Place]:
    on_host = [group.host_update_time is not None or not group.grad_bytes for group in chain.parameters]
    moved = [(HOST_UPDATED, STREAMED_HOST_UPDATED) if can else (STATE_STREAMED, STREAMED) for can in on_host]
    return [RESIDENT if k < r else spots[0] if k < r + z else spots[1] for k, spots in enumerate(moved)]
