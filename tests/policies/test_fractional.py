"""Euro-Par 2020, sections 3.2 to 5.2: its bound, lemmas and theorems, held on random chains."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.chains import chains
from oracles.fractional_program import fractional, fractional_optimum, interruptible_optimum, sets, whole

from rotoff import Chain, InfeasibleError, Stage, min_mem_limit, solve
from rotoff.solver.policies.dynprog import discretize, idle_of
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


def test_three_stages_by_hand() -> None:
    """F_3 and B_3 hold 14 bytes, 4 more than the limit: 1 of them leaves during F_2, 3 before F_3, and all return after
    B_3."""
    stages = (Stage("", 1.0, 1.0, 6, 6, 0), Stage("", 1.0, 1.0, 4, 4, 0), Stage("", 2.0, 1.0, 0, 4, 0))
    chain = Chain(stages, 1.0, 1.0, duplex=False)
    made = fractional.optimum(chain, 10)
    assert made.forward_starts[1:] == (0.0, 1.0, 5.0)
    assert (made.makespan, made.offloaded_bytes, made.gap) == (14.0, 4.0, 0.0)
    assert made.backward_starts[1:] == (13.0, 12.0, 7.0)


@given(integer_chains(), SHARES)
def test_theorem_2_the_eager_schedule_is_optimal(chain: Chain, share: float) -> None:
    limit = limit_of(chain, share)
    best = fractional_optimum(chain, limit)
    assert best is not None
    assert fractional.optimum(chain, limit).makespan == pytest.approx(best, rel=1e-6, abs=1e-6)


@given(chains(least=2, forms=False), SHARES, st.floats(0, 1), st.floats(0, 1))
def test_lemma_2_more_bytes_are_never_faster(chain: Chain, share: float, one: float, other: float) -> None:
    limit = limit_of(chain, share)
    least = max(0, fractional.peak_bytes(chain) - limit)
    most = sum(s.saved_bytes for s in chain.stages[:-1])
    first, second = sorted(least + x * max(0, most - least) for x in (one, other))
    made = [fractional.timeline(chain, limit, fractional.eager(chain, quantity)) for quantity in (least, first, second)]
    assert all(made)
    times = [m.makespan for m in made]
    assert all(a <= b * (1 + 1e-9) + 1e-9 for a, b in zip(times, times[1:], strict=False))


@given(chains(least=2, forms=False), SHARES)
def test_proposition_3_and_the_relaxations_are_bounds_in_order(chain: Chain, share: float) -> None:
    limit = limit_of(chain, share)
    bound, best = fractional.offload_bound(chain, limit), fractional.optimum(chain, limit).makespan
    assert bound <= best * (1 + 1e-9)
    if len(chain) <= 6:
        whole_values = interruptible_optimum(chain, limit)
        assert whole_values is not None
        assert best <= whole_values * (1 + 1e-9) + 1e-9
    plan = solve(chain, limit, "offload", refine=0.002).meta["makespan"]
    assert bound <= plan * (1 + 1e-9)
    if not chain.duplex:
        assert best <= plan * (1 + 1e-9) + 1e-9


@given(integer_chains(), SHARES)
def test_the_program_is_exact_where_a_slot_is_a_byte(chain: Chain, share: float) -> None:
    """Equations 1 to 10 against the timeline, for every set; Algorithm 1 against the best of all sets (Problem 2)."""
    limit = limit_of(chain, share)
    room = limit - chain.input_bytes
    assume(room > 0)
    slots = discretize(chain, limit, room)
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


@given(chains(least=2, forms=False), SHARES)
def test_what_does_not_fit_is_refused(chain: Chain, share: float) -> None:
    least = min_mem_limit(chain, "offload")
    if least > 1:
        with pytest.raises(InfeasibleError):
            fractional.optimum(chain, least - 1)
        amounts = fractional.eager(chain, sum(s.saved_bytes for s in chain.stages))
        assert fractional.timeline(chain, least - 1, amounts) is None
