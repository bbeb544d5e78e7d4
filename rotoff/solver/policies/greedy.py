"""GREEDY: offload the first stages' ā, as few as will do.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), section 4.2: "the no-wait, eager, ordered schedule which offloads (entirely) the first k activations,
where k is the smallest index such that Σ_{i≤k} |x_i| ≥ M_peak − M_GPU", the fractional optimum of Theorem 2 rounded up.

Interpretation: x_0, the caller's input, cannot leave here, so counting begins with ā_1; neither can ā_L. Where
copies are issued, δ_L and a_L count from the end of F_L and B_L on (`lowering.moving_needs`), and M_peak is the peak of
those needs.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.sequence import Sequence
from ..arrays import arrays
from ..bounds import min_mem_limit, refusal
from .lowering import lower, moving_needs, peak_bytes


def greedy_set(chain: Chain, mem_limit: int) -> list[int]:
    """Stages 1..k whose ā GREEDY offloads within `mem_limit` bytes."""
    if peak_bytes(chain) <= mem_limit:
        return []
    saved, missing, k = arrays(chain).saved[:, 0], max(moving_needs(chain)) - mem_limit, 0
    while missing > 0 and k < len(chain) - 1:
        k += 1
        missing -= int(saved[k])
    return list(range(1, k + 1))


def greedy(chain: Chain, mem_limit: int) -> Sequence:
    """GREEDY's sequence within `mem_limit` bytes.

    Raises:
        InfeasibleError: below the smallest limit of mode offload, where no schedule that runs every forward once
            exists.
    """
    least = min_mem_limit(chain, "offload")
    if mem_limit < least:
        raise refusal("with policy greedy", mem_limit, least)
    out = greedy_set(chain, mem_limit)
    made = lower(chain, mem_limit, out)
    assert made is not None, (
        "all below ā_k is away whenever one of the first k stages runs, and M_peak − M_GPU otherwise"
    )
    return Sequence(made.ops, meta={"source": f"greedy, k = {len(out)}"})
