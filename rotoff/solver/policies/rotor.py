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

import numpy as np

from ...core.chain import Chain
from ...core.modes import whole_number
from ...core.sequence import Sequence
from ..plan_codes import without_forms
from ..remat import Table, solve_slots
from .choose import by_slots


def rotor(chain: Chain, mem_limit: int, slots: int = 500) -> Sequence:
    """The persistent optimum at `slots` slots.

    Raises:
        InfeasibleError, OptionError: as `choose.by_slots`.
    """
    slots, plain = whole_number(slots, "slots"), without_forms(chain)

    def optimum(limit: int) -> tuple[float, np.ndarray | None]:
        return solve_slots(plain, limit, slots, whole=Table.BACKWARD)

    return by_slots("rotor", chain, mem_limit, slots, optimum)
