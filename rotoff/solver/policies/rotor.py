"""rotor: the persistent optimum of recompute, by the dynamic program of the slides.

Source: the slides *Memory Saving Strategies for Deep Neural Network Training* (2021), "Optimal checkpointing for
general sequential models", equation (1); m slots of memory, ω sizes in slots:

Opt_BP(i, ℓ, m) = min of
  Opt_1 = min over i < s ≤ ℓ of Σ_{k=i..s−1} u_f(k) + Opt_BP(s, ℓ, m − ω_a^{s−1}) + Opt_BP(i, s − 1, m),
  Opt_2 = u_f(i) + Opt_BP(i+1, ℓ, m − ω_ā^i) + u_b(i);
"formulas are valid when memory constraints are not violated": an ``F_ck`` or ``F_none`` of Opt_1 needs its operands,
its transients and δ_ℓ; ``F_all i`` of Opt_2 needs ā_i, its transients and δ_ℓ; ``B i`` needs ā_i, δ_i, δ_{i−1} and its
transients. Every size is rounded up to a slot, and the answer is Opt_BP(1, L, M) with M = the limit less a_0.

How `solve(mode="remat")` differs: its first sweep carries no δ_L (no gradient exists before the loss); it uses the
smaller forms of stages; it also rounds running sums, may keep an ā without its input, and searches on exact bytes from
there. In both, a_L, which the machine charges once it is made, is added to every need but stage L's own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..._dp import Opt, Table
from ...core.chain import Chain
from ...core.sequence import Op, Sequence
from ..arrays import MOST_LIMIT, arrays
from ..plan_codes import from_forwards
from ..remat import forwards
from ..search import judged
from ..slots import Slots, discretize, parse_slots
from .choose import fastest, least_in_slots, refusal


class Program:
    """Opt_BP of one chain at `N` slots; `cost` is its optimum in seconds, infinite if nothing fits."""

    def __init__(self, chain: Chain, mem_limit: int, N: int) -> None:
        c = arrays(chain)
        self.chain, self.L, self.N = chain, len(chain), N
        self.slots: Slots = discretize(replace(c, n_forms=np.ones_like(c.n_forms)), mem_limit, N, "up")
        # Segments may end at L, unlike those of `remat`, whose last sweep is a forward phase.
        self.kernel = Opt(self.slots, self.L, self.L, 0)
        for j in range(1, self.L + 1):
            self.kernel.fill_backward(j)
        self.cost = self.kernel.choice(Table.BACKWARD, 1, self.L, N)[0]

    def operations(self) -> tuple[Op, ...]:
        """An optimal sequence; `cost` must be finite."""
        codes = from_forwards(self.chain, forwards(self.kernel, self.slots, Table.BACKWARD, self.N))
        made = judged(self.chain, MOST_LIMIT, codes, "rotor")
        assert made is not None
        return made.ops


def rotor(chain: Chain, mem_limit: int, slots: int = 500) -> Sequence:
    """The persistent optimum at `slots` slots.

    Raises:
        InfeasibleError: if the recurrence finds nothing; its `min_mem_limit` is the smallest limit at which it would,
            to within one slot. OptionError: if `slots` are too few for any limit.
    """
    slots = parse_slots(slots, "slots")
    program = Program(chain, mem_limit, slots) if mem_limit > chain.input_bytes else None
    if program is None or not math.isfinite(program.cost):
        least = least_in_slots(
            chain,
            mem_limit,
            slots,
            lambda limit: limit > chain.input_bytes and math.isfinite(Program(chain, limit, slots).cost),
        )
        raise refusal("rotor", mem_limit, least, slots)
    return fastest(chain, mem_limit, "rotor", [(f"{slots} slots", program.operations())])
