"""The lowering of offloaded sets, and GREEDY, DYNPROG, VDNN, TFLMS and AUTOSWAP of Euro-Par 2020 on chains small enough
to read."""

from __future__ import annotations

import math
import sys
from itertools import chain as joined
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.chains import chains

from rotoff import Chain, InfeasibleError, Stage, min_mem_limit, simulate, solve
from rotoff.solver.policies.dynprog import Slots, idle_of
from rotoff.solver.policies.dynprog import optimum as program
from rotoff.solver.policies.lowering import lower, peak_bytes
from rotoff.solver.policies.moving_sets import choices

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))
from fractional import timeline

pytestmark = pytest.mark.full_search

# One direction at a time, 10 bytes a second. Keeping everything holds 30 + 20 + 20 + 10 = 80 bytes, at F_4 and B_4.
ROWS = ((1.0, 2.0, 30, 30), (2.0, 2.0, 20, 20), (3.0, 2.0, 20, 20), (1.0, 2.0, 0, 10))
FOUR = Chain(tuple(Stage("", *row, 0) for row in ROWS), 10.0, 10.0, duplex=False)


@given(
    chains(least=2, forms=False),
    st.data(),
    st.sampled_from(["copied", "next"]),
    st.sampled_from([None, 0, 2, 5]),
    st.booleans(),
)
def test_the_lowering_keeps_the_machines_time_and_limit(
    chain: Chain, data: st.DataObject, release: str, ahead: int | None, delay: bool
) -> None:
    out = data.draw(st.sets(st.integers(1, len(chain) - 1)))
    least, peak = min_mem_limit(chain, "offload"), max(1, peak_bytes(chain))
    limit = data.draw(st.integers(max(1, least), max(1, least, peak)))
    made = lower(chain, limit, out, release, ahead, delay)
    if made is None:
        return
    trace = simulate(chain, made.ops, limit)
    assert made.makespan == trace.makespan
    assert trace.d2h_bytes == sum(chain.stage(i).saved_bytes for i in out)


GOLDEN = {
    # 20 bytes are missing at F_4: all of ā_1, which F_3 has to wait for and which does not fit beside B_3.
    "greedy": """F_all 1, offload abar 1, F_all 2, free abar 1, F_all 3, F_all 4,
                 B 4, B 3, prefetch abar 1, wait abar 1, B 2, B 1""",
    # Slots of 60 / 500 bytes: ā_2 leaves too, during F_3, so that F_4 runs beside its way back.
    "dynprog": """F_all 1, offload abar 1, F_all 2, offload abar 2, free abar 1, F_all 3, free abar 2, prefetch abar 2, F_all 4,
                  B 4, wait abar 2, B 3, prefetch abar 1, wait abar 1, B 2, B 1""",
}


@pytest.mark.parametrize("policy", GOLDEN)
def test_golden_sequences_at_60_bytes(policy: str) -> None:
    made = solve(FOUR, 60, policy=policy)
    assert str(made).splitlines() == [op.strip() for op in GOLDEN[policy].split(",")]
    assert made.meta["makespan"] == 19.0  # F_3 starts at 4 s and not at 3; B_2 waits 3 s


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


@given(integer_chains(), st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8]))
def test_dynprog_is_exact_where_a_slot_is_a_byte(chain: Chain, share: float) -> None:
    """Equations 1 to 10 against the timeline, for every set that moves bytes (equations 2 and 7 take the copy of nothing
    for the end of the link's free time); Algorithm 1 against the best of all sets (Problem 2)."""
    least = min_mem_limit(chain, "offload")
    limit = round(least + share * (peak_bytes(chain) - least))
    assume(limit > chain.input_bytes)
    slots, best = Slots(chain, limit, limit - chain.input_bytes), math.inf
    saved = [stage.saved_bytes for stage in chain.stages]
    moving = [i for i in range(1, len(chain)) if saved[i - 1]]
    for out in joined.from_iterable(combinations(moving, count) for count in range(len(moving) + 1)):
        amounts = [float(saved[i - 1]) if i in out else 0.0 for i in range(len(chain) + 1)]
        made, idle = timeline(chain, limit, amounts), idle_of(slots, list(out))
        assert (made is None) == math.isinf(idle)
        if made is not None:
            assert made.makespan == pytest.approx(chain.compute_time + idle, abs=1e-6)
            best = min(best, made.makespan)
    found = program(slots)
    assert found is not None
    assert best == pytest.approx(chain.compute_time + found[0], abs=1e-6)


def test_vdnn_thresholds() -> None:
    """Ratios of ā_1, ā_2, ā_3 are 2/30, 3/20, 1/20 seconds a byte: ā_2 first, then ā_1, then ā_3, and every other one
    of them."""
    assert choices(FOUR) == [[], [2], [2], [1, 2], [1], [1, 2, 3], [1, 3]]


def test_tflms_never_waits_for_memory() -> None:
    """ā_1 leaves in [1, 4] s: in time for F_4, which starts at 6 s, but not for F_3 at 60 bytes, which starts at 3
    s."""
    made = solve(FOUR, 70, policy="tflms")
    assert (made.meta["source"], made.meta["makespan"]) == ("tflms, 1 tensors, 1 ahead", 16.0)
    with pytest.raises(InfeasibleError, match="with policy tflms") as caught:
        solve(FOUR, 60, policy="tflms")
    assert caught.value.min_mem_limit == 70


@given(chains(least=2, most=6, forms=False))
def test_greedy_fits_wherever_offloading_does(chain: Chain) -> None:
    least = max(1, min_mem_limit(chain, "offload"))
    assert solve(chain, least, policy="greedy").meta["peak_bytes"] <= least
