"""The lowering of offloaded sets, and GREEDY, DYNPROG, VDNN, TFLMS and AUTOSWAP of Euro-Par 2020 on chains small enough
to read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains
from oracles.fractional_program import fractional

from rotoff import Chain, InfeasibleError, Stage, min_mem_limit, simulate, solve
from rotoff.solver.policies.lowering import lower
from rotoff.solver.policies.moving_sets import choices

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
    least, peak = min_mem_limit(chain, "offload"), max(1, fractional.peak_bytes(chain))
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
