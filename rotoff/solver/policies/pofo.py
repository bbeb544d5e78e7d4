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

import math
from dataclasses import replace

from ...core.chain import Chain
from ...core.sequence import Sequence
from ...core.sizes import format_bytes
from ...errors import OptionError
from ..joint import solve_slots, table_bytes
from ..search import judged
from ..slots import parse_slots
from .choose import least_in_slots, refusal

SLOTS = 50
TABLE_BYTES = 8 << 30
ANY_SPEED = 1e30  # bytes a second; hides every copy


def pofo(chain: Chain, mem_limit: int, slots: int = SLOTS) -> Sequence:
    """The published program's optimum at `slots` slots, as operations.

    Raises:
        InfeasibleError: if the program finds nothing; its `min_mem_limit` is the smallest limit at which it would, to
            within one slot. OptionError: if `slots` are too few for any limit, or too many for 8 GiB of tables.
    """
    slots = parse_slots(slots, "slots")
    if (size := table_bytes(chain, slots, len(chain))) > TABLE_BYTES:
        raise OptionError(
            f"slots is {slots}: the tables of {len(chain)} stages would take {format_bytes(size)}, more than"
            f" {format_bytes(TABLE_BYTES)}; give fewer slots"
        )
    published = of_the_paper(chain, min(chain.d2h_bandwidth, chain.h2d_bandwidth))
    seconds, codes = solve_slots(published, mem_limit, slots)
    made = None if codes is None else judged(chain, mem_limit, codes, f"pofo, {slots} slots")
    if made is None:
        raise refusal("pofo", mem_limit, _least_limit(published, mem_limit, slots), slots)
    return Sequence(made.ops, meta={"source": made.source, "predicted_time": seconds})


def of_the_paper(chain: Chain, beta: float) -> Chain:
    """`chain` without smaller forms, and with `beta` bytes a second in both directions."""
    return replace(
        chain,
        stages=tuple(replace(stage, forms=()) for stage in chain.stages),
        d2h_bandwidth=beta,
        h2d_bandwidth=beta,
        d2h_bidirectional_bandwidth=None,
        h2d_bidirectional_bandwidth=None,
    )


def _least_limit(published: Chain, mem_limit: int, slots: int) -> int:
    """The smallest limit found above `mem_limit` at which the program has an answer: the first at which it has one on a
    link that hides every copy, and then one slot more at a time."""
    hidden = of_the_paper(published, ANY_SPEED)
    high = least_in_slots(
        published, mem_limit, slots, lambda limit: math.isfinite(solve_slots(hidden, limit, slots)[0])
    )
    while not math.isfinite(solve_slots(published, high, slots)[0]):
        high += -(-high // slots)  # rare: backlogs of copies leave no room for a checkpoint
    return high
