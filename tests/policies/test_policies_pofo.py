"""POFO as published: its recurrences against a literal form of them, and what its plans do on the machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.chains import chains
from oracles.recurrences import Recurrences
from thoroughness import examples

from rotoff import Chain, InfeasibleError, OptionError, Stage, keep_all, simulate, solve
from rotoff.solver.policies.pofo import of_the_paper

pytestmark = pytest.mark.full_search


@examples(150)
@given(chains(most=6), st.floats(0.2, 1.2), st.integers(1, 14))
def test_its_prediction_is_the_published_recurrence(chain, part, N):
    limit = int(simulate(chain, keep_all(chain)).peak_bytes * part)
    assume(limit > chain.input_bytes)
    published = of_the_paper(chain, min(chain.d2h_bandwidth, chain.h2d_bandwidth))
    literal = Recurrences(published, limit, N, "up").joint()
    try:
        assert solve(chain, limit, slots=N, policy="pofo").meta["predicted_time"] == pytest.approx(literal, abs=1e-9)
    except (InfeasibleError, OptionError):
        assert literal == math.inf


@examples(20)
@given(chains(most=6), st.floats(0.3, 1.0))
def test_ours_is_never_slower(chain, part):
    limit = max(1, int(simulate(chain, keep_all(chain)).peak_bytes * part))
    try:
        theirs = solve(chain, limit, policy="pofo")
    except InfeasibleError:
        return
    assert solve(chain, limit).meta["makespan"] <= theirs.meta["makespan"] * (1 + 1e-12)


def test_golden():
    """Six equal stages at two thirds of the peak: a fast link moves the first saved sets, a slow one has them made
    again."""
    stages = tuple(Stage("", 1.0, 2.0, 10, 30, grad_bytes=10) for _ in range(6))

    def made(bandwidth: float) -> str:
        chain = Chain(stages, bandwidth, bandwidth, input_bytes=10)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        return ", ".join(map(str, solve(chain, peak * 2 // 3, policy="pofo")))

    assert made(100.0) == (
        "F_all 1, offload abar 1, F_all 2, offload abar 2, F_all 3, offload abar 3, F_all 4, free abar 1, F_all 5, "
        "free abar 2, F_all 6, free abar 3, B 6, prefetch abar 3, B 5, prefetch abar 2, wait abar 3, B 4, prefetch abar"
        " 1, wait abar 2, B 3, wait abar 1, B 2, B 1"
    )
    assert made(0.01) == (
        "F_ck 1, F_none 2, F_none 3, F_all 4, F_all 5, F_all 6, B 6, B 5, B 4, F_all 1, F_all 2, F_all 3, B 3, B 2, B 1"
    )


def test_options():
    chain = Chain((Stage("", 1, 1, 1, 1),) * 2, 1, 1)
    with pytest.raises(OptionError, match="slots is 0"):
        solve(chain, 100, slots=0, policy="pofo")
    with pytest.raises(OptionError, match="8.00 GiB"):
        solve(chain, 100, slots=2000, policy="pofo")
