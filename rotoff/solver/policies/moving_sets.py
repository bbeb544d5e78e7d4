"""GREEDY, VDNN, vDNN++ and TFLMS: rules for which ā leave the device; `lowering.lower` makes the operations.

Sources: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), and the slides *Memory Saving Strategies for Deep Neural Network Training* (2021).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from ...core.chain import Chain
from ...core.sequence import Sequence
from ...errors import OptionError
from ..arrays import arrays
from ..bounds import min_mem_limit, refusal
from .choose import within
from .lowering import Schedule, lower, moving_needs, peak_bytes

SETS = ("all", "convolutions")
T = TypeVar("T")


def fastest_set(
    chain: Chain, mem_limit: int, sets: Iterable[tuple[T, Iterable[int]]], **how: Any
) -> tuple[Schedule, T] | None:
    """The fastest schedule of the sets of stages, and its name; None if none fits. how: as for `lower`."""
    found = [(made, name) for name, out in sets if (made := lower(chain, mem_limit, out, **how)) is not None]
    return min(found, key=lambda one: one[0].makespan, default=None)


# -- GREEDY


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
    """GREEDY: offload the first stages' ā, as few as will do.

    Source: Euro-Par 2020, section 4.2: "the no-wait, eager, ordered schedule which offloads (entirely) the first k
    activations, where k is the smallest index such that Σ_{i≤k} |x_i| ≥ M_peak − M_GPU", the fractional optimum of
    Theorem 2 rounded up.

    Interpretation: x_0, the caller's input, cannot leave here, so counting begins with ā_1; neither can ā_L. Where
    copies are issued, δ_L and a_L count from the end of F_L and B_L on (`lowering.moving_needs`), and M_peak is the
    peak of those needs.

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


# -- VDNN and vDNN++


def heavy_stages(chain: Chain) -> list[int]:
    """Stages whose name contains "conv"; if there are none, those whose u_F / |ā_i| is at least the chain's average."""
    named = [i for i, stage in enumerate(chain.stages, start=1) if "conv" in stage.name.lower()]
    if named:
        return named
    c = arrays(chain)
    time, size = float(c.u_F.sum()), int(c.saved[:, 0].sum())
    return [i for i in range(1, len(chain) + 1) if c.u_F[i] * size >= time * int(c.saved[i, 0])]


def choices(chain: Chain) -> list[list[int]]:
    """Every set of stages that VDNN tries, the empty one first."""
    c, L = arrays(chain), len(chain)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(c.u_F[2:] / c.saved[1:L, 0], nan=0.0, posinf=np.inf)
    sets: list[list[int]] = [[]]
    for threshold in sorted(set(ratio.tolist()), reverse=True):
        above = (np.flatnonzero(ratio >= threshold) + 1).tolist()
        sets += [above, above[::2]]
    return sets


def vdnn(chain: Chain, mem_limit: int) -> Sequence:
    """VDNN: offload the inputs of long computations, all of them or every other one.

    Source: Euro-Par 2020, section 6.1, after vDNN++ (Shriram, Garg, Kulkarni, IPDPS 2019), which offloads the inputs of
    convolutions, of all or of every other one. "We first compute the ratio u_F/|x_i| for all operations, and then for
    all possible thresholds, we compute the no-wait, ordered schedule which offloads all the activations whose ratio is
    above the threshold, and the one which offloads half of them. VDNN outputs the best schedule out of all these
    choices."

    Interpretation: x_i is the input of the operation whose time is in the numerator, so ā_i gets the forward time of
    stage i+1. A threshold lies between two ratios or above all (nothing moves). Half is every other one by rising
    stage, the first included. A copy that has not ended when the first prefetch starts frees nothing.
    """
    sets = [(len(out), out) for out in choices(chain)]
    made, moved = within("vdnn", mem_limit, lambda limit: fastest_set(chain, limit, sets), peak_bytes(chain))
    return Sequence(made.ops, meta={"source": f"vdnn, {moved} of {len(chain) - 1} offloaded"})


def vdnn_plus_plus(chain: Chain, mem_limit: int, what: str | None = None, synchronous: bool = False) -> Sequence:
    """vDNN++, and vDNN as in the slides: offload everything, or only the inputs of convolutions.

    Source: the slides, "vDNN [Rhu et al, 2016]" and "vDNN++ [Shriram et al, 2019]". vDNN "synchronizes each forward
    step with the corresponding offloading" and prefetches "synchronously but as soon as possible"; vDNN++ offloads
    "asynchronously with the forward steps". (Other parts of vDNN++ are not part of a plan: fragmentation concerns the
    allocator, and compression on the host only host bytes.)

    Interpretation: ā_i leaves, which contains the input of stage i+1. Synchronous: ``free`` follows the next forward
    and compute waits; the prefetch of the values that ``B i`` needs starts with ``B i+1``. Asynchronous: ā is freed
    when its copy has ended or memory is needed, and prefetched as early as memory allows. Convolutions are those of
    `heavy_stages`. The policy "vdnn" is Euro-Par 2020's account of the same system, with its own sets.

    Args:
        what: "all" or "convolutions"; None moves nothing if all fits (vDNN++ is dynamic there), else the faster set.
        synchronous: whether to run vDNN as in the slides.
    """
    if what not in (*SETS, None):
        raise OptionError(f"what is {what!r}; give 'all', 'convolutions', or None for the faster")
    every = {"nothing": [], "all": range(1, len(chain)), "convolutions": [i - 1 for i in heavy_stages(chain) if i > 1]}
    sets = [(name, out) for name, out in every.items() if what in (name, None)]
    how: dict[str, Any] = {"release": "next", "ahead": 1} if synchronous else {}
    most = 2 * peak_bytes(chain) + chain.output_bytes(len(chain)) + mem_limit
    made, name = within("vdnn++", mem_limit, lambda limit: fastest_set(chain, limit, sets, **how), most)
    return Sequence(made.ops, meta={"source": f"vdnn++, {name}" + (", synchronous" if synchronous else "")})


# -- TFLMS


def longest_ahead(chain: Chain, mem_limit: int, tensors: int) -> tuple[Schedule, int] | None:
    """The schedule that prefetches farthest ahead, and how far; None if none fits `mem_limit` bytes."""
    out = range(1, tensors + 1)

    def tried(ahead: int) -> Schedule | None:
        return lower(chain, mem_limit, out, ahead=ahead, delay=False)

    made = tried(0)
    if made is None or tensors == 0:
        return None if made is None else (made, 0)
    fits, beyond = 0, 1
    while beyond < 2 * len(chain) and (longer := tried(beyond)) is not None:
        made, fits, beyond = longer, beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        longer = tried(middle)
        if longer is None:
            beyond = middle
        else:
            made, fits = longer, middle
    return made, fits


def best_tensors(chain: Chain, mem_limit: int) -> tuple[Schedule, int, int] | None:
    """(schedule, tensors, layers ahead) of the fastest parameters within `mem_limit` bytes; None if none fit."""
    found: tuple[Schedule, int, int] | None = None
    for tensors in range(len(chain)):
        made = longest_ahead(chain, mem_limit, tensors)
        if made is not None and (found is None or made[0].makespan < found[0].makespan):
            found = made[0], tensors, made[1]
            if made[0].makespan <= chain.compute_time * (1 + 1e-12):
                break
    return found


def tflms(chain: Chain, mem_limit: int) -> Sequence:
    """TFLMS: swap the first tensors out as they are made, and back in a fixed number of layers ahead.

    Source: Euro-Par 2020, sections 6.1 and 6.2, on TFLMS (Le, Imai, Negishi, Kawachiya, 2018): it "is parameterized
    with the number of tensors to be offloaded and how many layers in advance the data should be prefetched. We present
    results with the parameters which, for a given memory size, achieve the lowest makespan among all possible values";
    it "is unable to delay forward computations until enough memory is made available through offloading".

    Interpretation: TFLMS takes tensors by the distance between the operations that make and use them, the longest
    first, which in a chain is the order of stages. A swapped tensor's memory is free once its copy out has ended; if
    the next operation does not fit by then, these parameters do not fit. The distance ahead counts operations, forwards
    included: 0 is just before the need. A longer distance starts copies earlier and holds memory for longer, so for
    each number of tensors the longest one that fits is taken, found by doubling and bisection.
    """

    def fits(limit: int) -> bool:
        return any(lower(chain, limit, range(1, n + 1), ahead=0, delay=False) for n in range(len(chain)))

    most = max(peak_bytes(chain), *moving_needs(chain))
    schedule, number, distance = within("tflms", mem_limit, lambda limit: best_tensors(chain, limit), most, fits=fits)
    return Sequence(schedule.ops, meta={"source": f"tflms, {number} tensors, {distance} ahead"})
