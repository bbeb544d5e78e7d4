"""Bounds: below every sequence, in order, and the smallest limits in sentences."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from oracles.exhaustive import Search
from random_programs import mutants, placed
from thoroughness import examples

from rotoff import (
    Chain,
    InfeasibleError,
    InvalidSequenceError,
    Op,
    OpKind,
    OptionError,
    ParameterGroup,
    Sequence,
    SequenceFormatError,
    Stage,
    keep_all,
    lower_bound,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.core.sequence import drop, prefetch, w, wait
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


WITH_PARAMETERS = chains(most=4).flatmap(groups).filter(lambda chain: chain.parameters)


# -- a steady step with parameters: sequences


@given(WITH_PARAMETERS.flatmap(busy), st.integers(0, 10**9), st.sampled_from(["during", "after"]))
@examples(40)
def test_no_sequence_beats_the_bound(chain: Chain, seed: int, updates: str) -> None:
    rng = random.Random(seed)
    made = placed(chain, rng, updates)
    trace = simulate(chain, made, updates=updates)
    limit = max(1, trace.peak_bytes)
    bound, best = lower_bound(chain, limit, updates=updates), trace.makespan
    others = mutants(made.to_dict() | {"resident": made.resident}, len(chain.parameters), rng)
    mutant = next(others)
    for _ in range(60):
        try:
            found = simulate(chain, Sequence.from_dict(mutant), limit, updates).makespan
        except (InvalidSequenceError, SequenceFormatError):
            found = math.inf
        best = min(best, found)
        mutant = others.send(found <= best)
    assert bound <= best * (1 + 1e-9)


def in_flight(stages: int, ahead: int, copy: float) -> tuple[Chain, Sequence]:
    """A chain of frozen groups, and a sequence in which their parameters come in `ahead` operations before their use,
    around the step's end."""
    frozen = tuple(ParameterGroup((i,), round(copy * 100)) for i in range(1, stages + 1))
    chain = Chain((Stage("", 1.0, 1.0),) * stages, 1.0, 100.0, parameters=frozen)
    uses = [*range(1, stages + 1), *range(stages, 0, -1)]
    arriving: set[int] = set()
    for _ in range(2):  # the second time from the state in which the first ends
        device, ops = set(uses[:ahead]), []
        for t, k in enumerate(uses):
            if k in arriving:
                ops.append(wait(w(k)))
                arriving.remove(k)
            ops.append(Op(OpKind.F_ALL if t < stages else OpKind.B, k))
            soon = [uses[(t + n) % len(uses)] for n in range(1, ahead + 1)]
            if k not in soon:
                ops.append(drop(w(k)))
                device.remove(k)
            if soon[-1] not in device:
                ops.append(prefetch(w(soon[-1])))
                device.add(soon[-1])
                arriving.add(soon[-1])
    return chain, Sequence(tuple(ops), resident=[f"w {k}" for k in sorted(device)])


def test_copies_that_fall_behind_for_four_steps_are_below_the_link_but_not_below_the_bound() -> None:
    chain, sequence = in_flight(20, 8, 1.28)
    trace = simulate(chain, sequence)
    link = trace.h2d_bytes / chain.h2d_bandwidth
    assert trace.makespan == pytest.approx(40.68)
    assert link == pytest.approx(40.96)
    assert lower_bound(chain, trace.peak_bytes) <= trace.makespan
    assert lower_bound(chain, trace.peak_bytes, steps=math.inf) <= link
    with pytest.raises(OptionError, match="steps is 3; give a number of at least 4"):
        lower_bound(chain, trace.peak_bytes, steps=3)


# -- by hand


def test_what_fits_costs_the_updates_that_the_host_cannot_do() -> None:
    stages = (Stage("", 1.0, 2.0, 10, 100),) * 2
    updated = ParameterGroup((1,), 50, 50, 100, update_time=0.5)
    chain = Chain(stages, 1000.0, 1000.0, 10, parameters=(updated, replace(updated, stages=(2,))))
    peak = simulate(chain, keep_all(chain)).peak_bytes
    for when in ("during", "after"):
        assert lower_bound(chain, 10 * peak, updates=when) == pytest.approx(7.0)
    assert lower_bound(chain, 10 * peak, mode="remat") == pytest.approx(7.0)
    on_host = replace(chain, parameters=tuple(replace(g, host_update_time=0.1) for g in chain.parameters))
    # After B 1, g 1 leaves (0.05 s), is used on the host (0.1 s), and w 1 comes back (0.05 s), before F 1.
    assert 6.04 <= lower_bound(on_host, 10 * peak) <= solve(on_host, 10 * peak).meta["makespan"] == pytest.approx(6.2)


def test_one_of_two_weights_at_a_time() -> None:
    # w 2 comes in between the end of F 1 and F 2, w 1 between that of B 2 and B 1; it stays from B 1 to F 1.
    frozen = (ParameterGroup((1,), 100), ParameterGroup((2,), 100))
    chain = Chain((Stage("", 1.0, 1.0),) * 2, 1.0, 100 / 3, parameters=frozen)
    assert lower_bound(chain, 100) == pytest.approx(1 + 3 + 1 + 1 + 3 + 1)
    assert lower_bound(chain, 200) == pytest.approx(4.0)
    assert min_mem_limit(chain, "joint") == 100


@pytest.mark.parametrize("out", [1e-3, 100.0])
def test_a_stage_is_made_again_once_its_weights_are_there(out: float) -> None:
    # At B 2 there is room for nothing else. Then w 1 comes in (3 s), and F 1 runs again (1 s), or abar 1 comes in (3 s).
    # w 2 comes in during F 1 and after it.
    frozen = (ParameterGroup((1,), 100), ParameterGroup((2,), 100))
    chain = Chain((Stage("", 1.0, 1.0, 0, 100),) * 2, out, 100 / 3, parameters=frozen)
    assert lower_bound(chain, 200, steps=math.inf) == pytest.approx(3 + 1 + 1 + 3 + 1 + 1)
    assert solve(chain, 200, refine=0.05).meta["makespan"] == pytest.approx(10.0)


def test_smallest_limits_by_hand() -> None:
    stages = (Stage("", 1.0, 1.0, 10, 30, grad_bytes=4), Stage("", 1.0, 1.0, 2, 20, grad_bytes=3))
    group = ParameterGroup((1, 2), 100, 50, 200, host_update_time=1.0)
    chain = Chain(stages, 1.0, 1.0, input_bytes=5, input_grad_bytes=1, parameters=(group,))
    # B 1: abar 1, a_0, a_2, δ_1, δ_0, w and g. B 2: abar 2, a 1, a_0, δ_2, δ_1, w and g.
    assert min_mem_limit(chain, "joint") == max(30 + 5 + 2 + 4 + 1, 20 + 10 + 5 + 3 + 4) + 150
    on_device = replace(chain, parameters=(replace(group, host_update_time=None, update_transient_bytes=7),))
    assert min_mem_limit(on_device, "joint") == 5 + 2 + 1 + 100 + 50 + 200 + 7
    assert min_mem_limit(on_device, "remat") >= min_mem_limit(chain.without_parameters(), "remat") + 300
    with pytest.raises(InfeasibleError, match=r"365 bytes\) in mode joint; the limit is 364 B") as caught:
        lower_bound(on_device, 364)
    assert caught.value.min_mem_limit == 365
    assert 0 < lower_bound(on_device, 365) < math.inf
