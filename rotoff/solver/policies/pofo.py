"""POFO: recompute and offload by the published dynamic program alone, of N = 50 slots.

Source: the supplement of the NeurIPS 2021 paper on combining both, B.1 (forward phase, OC), B.2 (loss) and B.3
(backward phase, C_A), which `rotoff/_dp.pyx` has beside their equations. Assumptions of the paper: what is kept stays
until its backward; only stage inputs move, out in the forward phase and back in the backward phase; one bandwidth β
both ways; memory is released while it leaves and taken while it comes; "N = 50 values is enough".

Interpretation:

- The supplement only says "discretized". Each size held is rounded up to a slot; `solver.slots` has the other rules.
- a_0 is the input I of stage 1, is kept and never moves, so slots divide the room beside it. a_L stays with the caller,
  so it is added to the gradient in every backward-phase need but stage L's own. β is the slower direction's.
- No smaller forms of stages: the paper has none.
- The program decides which values are kept, moved and recomputed. The decoder of `solve` makes operations of this, with
  whole values at exact bytes on a link with two directions; a value that the program moves leaves only if its room is
  needed. The machine's time therefore differs from the program's (`predicted_time` in the sequence's meta).

How `solve` differs: it has a β for each direction, smaller forms, a second rule of rounding, and starts a search on
exact bytes from the result.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Sequence
from ..joint import solve_slots
from ..plan_codes import without_forms
from .choose import by_slots

SLOTS = 50


def pofo(chain: Chain, mem_limit: int, slots: int = SLOTS) -> Sequence:
    """The published program's optimum at `slots` slots, as operations.

    Raises:
        InfeasibleError: as `choose.by_slots`. OptionError: if `slots` are too few for any limit, or too many for 8 GiB
            of tables.
    """
    slots = whole_number(slots, "slots")
    published = of_the_paper(chain, min(chain.d2h_bandwidth, chain.h2d_bandwidth))
    return by_slots("pofo", chain, mem_limit, slots, lambda limit: solve_slots(published, limit, slots))


def of_the_paper(chain: Chain, beta: float) -> Chain:
    """`chain` without smaller forms, and with `beta` bytes a second in both directions."""
    return replace(
        without_forms(chain),
        d2h_bandwidth=beta,
        h2d_bandwidth=beta,
        d2h_bidirectional_bandwidth=None,
        h2d_bidirectional_bandwidth=None,
    )
