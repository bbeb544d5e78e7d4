"""Bounds: below every sequence, in order, and the smallest limits in sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains
from oracles.exhaustive import Search
from thoroughness import examples

from rotoff import Chain, InfeasibleError, Stage, lower_bound, min_mem_limit, simulate, solve
from rotoff.solver import keep_all
from rotoff.solver.bounds import largest_operation

pytestmark = pytest.mark.full_search


@given(chains())
def test_the_joint_minimum_is_the_smallest_and_at_least_what_the_largest_operation_needs(chain: Chain) -> None:
    least = min_mem_limit(chain, "joint")
    assert least <= min(min_mem_limit(chain, "remat"), min_mem_limit(chain, "offload"))
    phase, stage, nbytes = largest_operation(chain)
    assert phase in ("forward", "backward") and 1 <= stage <= len(chain) and nbytes <= least


def test_minima_by_hand() -> None:
    # B 2 needs abar 2, abar 1 (its input), δ_2, δ_1 and a_0; recompute or a copy may replace abar 1 by a 1.
    chain = Chain((Stage("", 1.0, 1.0, 10, 100), Stage("", 1.0, 1.0, 1, 50)), 1.0, 1.0, input_bytes=5)
    assert min_mem_limit(chain, "offload") == 5 + 100 + 50 + 1 + 10
    assert min_mem_limit(chain, "remat") == 5 + 100 + 10 + 1  # B 1, with a_2 still held
    assert min_mem_limit(chain, "joint") == 5 + 100 + 10 + 1
    assert largest_operation(chain) == ("backward", 1, 5 + 100 + 10 + 1)
    with pytest.raises(InfeasibleError, match=r"needs at least 116 B \(116 bytes\) in mode joint; the limit is 115 B"):
        lower_bound(chain, 115)
    large_forward = Chain((Stage("", 1.0, 1.0, 10, 20, forward_transient_bytes=500),), 1.0, 1.0, input_bytes=5)
    assert largest_operation(large_forward) == ("forward", 1, 5 + 20 + 500)


def test_the_bound_is_tight_where_all_fits_and_sees_the_link() -> None:
    chain = Chain(tuple(Stage("", 1.0, 2.0, 10, 30) for _ in range(10)), 10.0, 10.0)
    peak = simulate(chain, keep_all(chain)).peak_bytes
    assert lower_bound(chain, peak) == pytest.approx(30.0)
    assert lower_bound(chain, peak // 2) > 31.0


def test_the_bound_knows_that_an_input_beside_which_its_abar_does_not_fit_is_made_by_itself() -> None:
    """Over a fast link every ā moves for nothing, but none fits beside the next backward, which takes an a."""
    chain = Chain(tuple(Stage("", 1.0, 1.0, 10, 100) for _ in range(6)), 1e6, 1e6)
    limit = min_mem_limit(chain, "joint")
    assert lower_bound(chain, limit) == pytest.approx(chain.compute_time + 5, rel=1e-3)
    assert lower_bound(chain, limit + 100) == pytest.approx(chain.compute_time, rel=1e-3)
    assert solve(chain, limit).meta["makespan"] < chain.compute_time + 5.01


@given(chains(least=2, most=4, forms=False), st.sampled_from([0.0, 0.05, 0.2]))
def test_no_optimum_is_below_the_bound(chain: Chain, share: float) -> None:
    least, peak = min_mem_limit(chain, "joint"), simulate(chain, keep_all(chain)).peak_bytes
    limit = max(1, round(least + share * max(0, peak - least)))
    ours = solve(chain, limit, refine=0.01).meta["makespan"]
    optimum = Search(chain, limit).optimum(ours, 5_000)
    if optimum is not None:
        assert lower_bound(chain, limit) <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [0.3, 3.0, None])
@examples(60)
@given(chains(least=2, most=6), st.sampled_from([0.05, 0.3, 0.6]), st.integers(0, 10**6))
def test_wrong_prices_of_a_solver_give_a_lower_bound(
    wrong: float | None, chain: Chain, share: float, seed: int
) -> None:
    """Or it has none."""
    least, peak = min_mem_limit(chain, "joint"), simulate(chain, keep_all(chain)).peak_bytes
    limit = max(1, round(least + share * max(0, peak - least)))
    solved, rng = scipy.optimize.linprog, np.random.default_rng(seed)

    def misled(*args: Any, **options: Any) -> Any:
        found = solved(*args, **options)
        for rows in (found.ineqlin, found.eqlin):
            factors = 1 + (wrong or 0) * rng.normal(size=rows.marginals.shape) * (
                rng.random(rows.marginals.shape) < 0.1
            )
            rows.marginals = None if wrong is None else rows.marginals * factors
        return found

    bound = lower_bound(chain, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scipy.optimize, "linprog", misled)
        assert lower_bound(replace(chain, name="misled"), limit) <= bound * (1 + 1e-6)  # not one that it remembers
