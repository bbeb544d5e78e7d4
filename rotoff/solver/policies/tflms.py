"""TFLMS: swap the first tensors out as they are made, and back in a fixed number of layers ahead.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), sections 6.1 and 6.2, on TFLMS (Le, Imai, Negishi, Kawachiya, 2018): it "is parameterized with the
number of tensors to be offloaded and how many layers in advance the data should be prefetched. We present results with
the parameters which, for a given memory size, achieve the lowest makespan among all possible values"; it "is unable to
delay forward computations until enough memory is made available through offloading".

Interpretation: TFLMS takes tensors by the distance between the operations that make and use them, the longest first,
which in a chain is the order of stages. A swapped tensor's memory is free once its copy out has ended; if the next
operation does not fit by then, these parameters do not fit. The distance ahead counts operations, forwards included: 0
is just before the need. A longer distance starts copies earlier and holds memory for longer, so for each number of
tensors the longest one that fits is taken, found by doubling and bisection.
"""

from __future__ import annotations

from ...core.chain import Chain
from ...core.sequence import Sequence
from .choose import within
from .lowering import Schedule, lower, moving_needs, peak_bytes


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


def best(chain: Chain, mem_limit: int) -> tuple[Schedule, int, int] | None:
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
    """TFLMS's sequence within `mem_limit` bytes, with the parameters that make the fastest one."""

    def fits(limit: int) -> bool:
        return any(lower(chain, limit, range(1, n + 1), ahead=0, delay=False) for n in range(len(chain)))

    most = max(peak_bytes(chain), *moving_needs(chain))
    schedule, number, distance = within("tflms", mem_limit, lambda limit: best(chain, limit), most, fits=fits)
    return Sequence(schedule.ops, meta={"source": f"tflms, {number} tensors, {distance} ahead"})
