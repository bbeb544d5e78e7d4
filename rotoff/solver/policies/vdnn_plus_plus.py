"""vDNN++, and vDNN as in the slides: offload everything, or only the inputs of convolutions.

Source: the slides *Memory Saving Strategies for Deep Neural Network Training* (2021), "vDNN [Rhu et al, 2016]" and
"vDNN++ [Shriram et al, 2019]". vDNN "synchronizes each forward step with the corresponding offloading" and prefetches
"synchronously but as soon as possible"; vDNN++ offloads "asynchronously with the forward steps". (Other parts of vDNN++
are not part of a plan: fragmentation concerns the allocator, and compression on the host only host bytes.)

Interpretation: ā_i leaves, which contains the input of stage i+1. Synchronous: ``free`` follows the next forward and
compute waits; the prefetch of the values that ``B i`` needs starts with ``B i+1``. Asynchronous: `lowering.lower`; ā is
freed when its copy has ended or memory is needed, and prefetched as early as memory allows. Convolutions are those of
`heavy.heavy_stages`. The policy "vdnn" is Euro-Par 2020's account of the same system, with its own sets.
"""

from __future__ import annotations

from typing import Any

from ...core.chain import Chain
from ...core.sequence import Sequence
from ...errors import OptionError
from .choose import within
from .heavy import heavy_stages
from .lowering import Schedule, lower, peak_bytes

SETS = ("all", "convolutions")


def moving_set(chain: Chain, what: str) -> list[int]:
    """Stages whose ā leaves: all but the last, or those before a convolution."""
    L = len(chain)
    return list(range(1, L)) if what == "all" else [i - 1 for i in heavy_stages(chain) if i > 1]


def vdnn_plus_plus(chain: Chain, mem_limit: int, what: str | None = None, synchronous: bool = False) -> Sequence:
    """vDNN++ within `mem_limit` bytes.

    Args:
        what: "all" or "convolutions"; None moves nothing if all fits (vDNN++ is dynamic there), else the faster set.
        synchronous: whether to run vDNN as in the slides.
    """
    if what not in (*SETS, None):
        raise OptionError(f"what is {what!r}; give 'all', 'convolutions', or None for the faster")
    most = 2 * peak_bytes(chain) + chain.output_bytes(len(chain)) + mem_limit
    made, name = within("vdnn++", mem_limit, lambda limit: _best(chain, limit, what, synchronous), most)
    return Sequence(made.ops, meta={"source": f"vdnn++, {name}" + (", synchronous" if synchronous else "")})


def _best(chain: Chain, mem_limit: int, what: str | None, synchronous: bool) -> tuple[Schedule, str] | None:
    """The fastest schedule and the name of its set, or None."""
    names = SETS if what is None else (what,)
    sets: dict[str, list[int]] = {"nothing": []} if what is None else {}
    sets |= {name: moving_set(chain, name) for name in names}
    how: dict[str, Any] = {"release": "next", "ahead": 1} if synchronous else {}
    made = [(lower(chain, mem_limit, out, **how), name) for name, out in sets.items()]
    fitting = [(schedule, name) for schedule, name in made if schedule is not None]
    return min(fitting, key=lambda one: one[0].makespan, default=None)
