"""VDNN: offload the inputs of long computations, all of them or every other one.

Source: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(Euro-Par 2020), section 6.1, after vDNN++ (Shriram, Garg, Kulkarni, IPDPS 2019), which offloads the inputs of
convolutions, of all or of every other one. "We first compute the ratio u_F/|x_i| for all operations, and then for all
possible thresholds, we compute the no-wait, ordered schedule which offloads all the activations whose ratio is above
the threshold, and the one which offloads half of them. VDNN outputs the best schedule out of all these choices."

Interpretation: x_i is the input of the operation whose time is in the numerator, so ā_i gets the forward time of
stage i+1. A threshold lies between two ratios or above all (nothing moves). Half is every other one by rising stage,
the first included. `lowering.lower` defines the schedules: a copy that has not ended when the first prefetch starts
frees nothing.
"""

from __future__ import annotations

import numpy as np

from ...core.chain import Chain
from ...core.sequence import Sequence
from ..arrays import arrays
from .choose import within
from .lowering import Schedule, lower, peak_bytes


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


def best(chain: Chain, mem_limit: int) -> tuple[Schedule, list[int]] | None:
    """The fastest schedule of all choices within `mem_limit` bytes, and its set; None if none fits."""
    found = [(made, out) for out in choices(chain) if (made := lower(chain, mem_limit, out)) is not None]
    return min(found, key=lambda one: one[0].makespan, default=None)


def vdnn(chain: Chain, mem_limit: int) -> Sequence:
    """VDNN's sequence within `mem_limit` bytes."""
    made, out = within("vdnn", mem_limit, lambda limit: best(chain, limit), peak_bytes(chain))
    return Sequence(made.ops, meta={"source": f"vdnn, {len(out)} of {len(chain) - 1} offloaded"})
