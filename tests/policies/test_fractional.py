"""Euro-Par 2020, sections 3.2 to 5.2: its bound, lemmas and theorems, held on random chains."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.fractional_program import fractional, interruptible_optimum, sets, whole

from rotoff import Chain, Stage, min_mem_limit
from rotoff.solver.policies.dynprog import Slots, idle_of
from rotoff.solver.policies.dynprog import optimum as program

SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8])


@st.composite
def integer_chains(draw: st.DrawFn, most: int = 6) -> Chain:
    """Whole bytes and seconds, one byte a second in one direction at a time: a slot of S = room is a byte."""
    size, time = st.integers(0, 8), st.integers(0, 6)
    made = []
    for _ in range(draw(st.integers(2, most))):
        output = draw(size)
        names = ("grad_bytes", "forward_transient_bytes", "backward_transient_bytes")
        extra = {name: draw(st.integers(0, 3)) for name in names}
        made.append(Stage("", float(draw(time)), float(draw(time)), output, output + draw(size), **extra))
    return Chain(tuple(made), 1.0, 1.0, input_bytes=draw(st.integers(0, 3)), duplex=False)


def limit_of(chain: Chain, share: float) -> int:
    """A limit between the smallest of mode offload and the peak."""
    least = min_mem_limit(chain, "offload")
    limit = round(least + share * (fractional.peak_bytes(chain) - least))
    assume(limit > 0)
    return limit


@given(integer_chains(), SHARES)
def test_the_program_is_exact_where_a_slot_is_a_byte(chain: Chain, share: float) -> None:
    """Equations 1 to 10 against the timeline, for every set; Algorithm 1 against the best of all sets (Problem 2)."""
    limit = limit_of(chain, share)
    room = limit - chain.input_bytes
    assume(room > 0)
    slots = Slots(chain, limit, room)
    for out in sets(len(chain)):
        if not all(chain.stage(i).saved_bytes for i in out):
            continue  # equations 2 and 7 take the copy of nothing for the end of the link's free time
        made = fractional.timeline(chain, limit, whole(chain, out))
        idle = idle_of(slots, list(out))
        assert (made is None) == math.isinf(idle)
        if made is not None:
            assert made.makespan == pytest.approx(chain.compute_time + idle, abs=1e-6)
    best, found = interruptible_optimum(chain, limit), program(slots)
    assert best is not None and found is not None
    assert best == pytest.approx(chain.compute_time + found[0], abs=1e-6)
