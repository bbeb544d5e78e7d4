"""Bounds: below every sequence, in order, and the smallest limits in sentences."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, uneven
from oracles.exhaustive import Search
from oracles.link_price import link_price

from rotoff import Chain, InfeasibleError, LimitError, OptionError, Stage, lower_bound, min_mem_limit, simulate, solve
from rotoff.solver import bounds, keep_all
from rotoff.solver.bounds import largest_operation
from rotoff.solver.kernels.bound import ascend

pytestmark = pytest.mark.full_search


@given(chains().flatmap(busy), st.sampled_from([0.0, 0.1, 0.4, 0.8]))
def test_no_sequence_beats_the_bound(chain: Chain, share: float) -> None:
    least, peak = min_mem_limit(chain, "joint"), simulate(chain, keep_all(chain)).peak_bytes
    limit = max(1, round(least + share * max(0, peak - least)))
    bound = lower_bound(chain, limit)
    assert bound <= simulate(chain, solve(chain, limit, refine=0.01), limit).makespan * (1 + 1e-9)


@given(chains())
def test_the_joint_minimum_is_the_smallest(chain: Chain) -> None:
    assert min_mem_limit(chain, "joint") <= min(min_mem_limit(chain, "remat"), min_mem_limit(chain, "offload"))


@given(chains())
def test_no_limit_is_below_what_the_largest_operation_needs(chain: Chain) -> None:
    phase, stage, nbytes = largest_operation(chain)
    assert phase in ("forward", "backward")
    assert 1 <= stage <= len(chain)
    assert nbytes <= min_mem_limit(chain, "joint")


def test_minima_by_hand() -> None:
    # B 2 needs abar 2, abar 1 (its input), δ_2, δ_1 and a_0; recompute or a copy may replace abar 1 by a 1.
    chain = Chain((Stage("", 1.0, 1.0, 10, 100), Stage("", 1.0, 1.0, 1, 50)), 1.0, 1.0, input_bytes=5)
    assert min_mem_limit(chain, "offload") == 5 + 100 + 50 + 1 + 10
    assert min_mem_limit(chain, "remat") == 5 + 100 + 10 + 1  # B 1, with a_2 still held
    assert min_mem_limit(chain, "joint") == 5 + 100 + 10 + 1
    assert largest_operation(chain) == ("backward", 1, 5 + 100 + 10 + 1)
    large_forward = Chain((Stage("", 1.0, 1.0, 10, 20, forward_transient_bytes=500),), 1.0, 1.0, input_bytes=5)
    assert largest_operation(large_forward) == ("forward", 1, 5 + 20 + 500)


def test_the_bound_is_tight_where_all_fits_and_sees_the_link() -> None:
    chain = Chain(tuple(Stage("", 1.0, 2.0, 10, 30) for _ in range(10)), 10.0, 10.0)
    peak = simulate(chain, keep_all(chain)).peak_bytes
    assert lower_bound(chain, peak) == pytest.approx(30.0)
    assert lower_bound(chain, peak // 2) > 31.0


def test_refusals() -> None:
    chain = Chain((Stage("", 1.0, 1.0, 10, 100),), 1.0, 1.0, input_bytes=5)
    with pytest.raises(OptionError, match="modes are"):
        min_mem_limit(chain, "both")
    with pytest.raises(LimitError):
        lower_bound(chain, -1)
    least = min_mem_limit(chain, "joint")
    with pytest.raises(
        InfeasibleError, match=f"needs at least 115 B \\({least} bytes\\) in mode joint; the limit is 114 B"
    ):
        lower_bound(chain, least - 1)


def _dual(prices: np.ndarray, costs: tuple) -> float:
    """The dual that `kernels.bound` ascends, at given prices, every way of every ā_q and every input's written out."""
    duplex, out_rate, in_rate, room, work, u_F, saved, slower, entry, n_forms, apart, out, *shares = costs
    lam, p, r, lam2, r2, alpha2 = prices
    n, L = len(lam), len(lam) // 2
    whole, inward = (1 - link_price(p, r + r2, shares), r) if duplex else (1 - p - r2, p)
    alpha = whole - alpha2
    value = float(whole @ work - (lam + lam2) @ room)
    for q in range(1, L):
        first, last = q, n - q - 1
        ends, late = entry[q] * lam[first], entry[q] * (lam[last] + lam2[last])
        ways = []
        for k in range(n_forms[q]):
            size, slow = saved[q, k], whole[n - q] * slower[q, k]
            held = [[size * lam[a : b + 1].sum() for b in range(n)] for a in range(n + 1)]
            left = [size * p[first - 1] * out_rate + held[first][first] - ends]
            left += [size * p[a] * out_rate + held[first][a] - ends for a in range(first, n)]
            left = [np.inf] if apart[q, k] & 1 else left
            own = size * lam2[last]
            back = [size * inward[b] * in_rate + held[b + 1][last] + own - late for b in range(first - 1, last)]
            back = [np.inf] if apart[q, k] & 2 else back
            ways += [min(left) + min(back) + slow]
            left += [size * p[first - 1] * out_rate]
            back += [size * (inward[last] + r2[last]) * in_rate]
            ways += [min(left) + min(back) + min(alpha[first - 1 : last]) * u_F[q] + slow]
            ways += [] if apart[q, k] else [held[first][last] + own - ends - late + slow]
            for b in range(first - 1, last + 1):
                off = (late - own if b < last else 0.0) + (ends if b < first else 0.0)
                if b == last or not apart[q, k] & (3 if b < first else 2):
                    ways.append((whole if b == last else alpha)[b] * u_F[q] + held[b + 1][last] - off + slow)
                moved = min(size * p[a] * out_rate + held[b + 1][a] for a in range(b, n)) + min(back) - late - ends
                ways.append(alpha[b] * u_F[q] + moved + slow)
        value += min(ways)
    for m in range(2, L) if out is not None else ():
        k = n - m - 1
        runs = [alpha2[k] * sum(u_F[q + 1 : m]) for q in range(m)]
        value += min(runs[q] + (min(lam2[k], r2[k] * in_rate) * out[q] if q else 0.0) for q in range(m))
    return value


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_dual_is_that_of_every_way_written_out(seed: int, inputs: bool) -> None:
    rng = np.random.default_rng(seed)
    L, K, duplex = int(rng.integers(2, 9)), int(rng.integers(1, 4)), bool(rng.integers(2))
    n, link = 2 * L, 10 ** rng.uniform(-1, 1)
    entry = rng.random(L + 1) * 0.1
    saved = entry[:, None] + rng.random((L + 1, K)) * 0.3
    costs = (duplex, link, link * rng.uniform(0.5, 2), rng.random(n), rng.random(n), rng.random(L + 1) / L, saved)
    costs += (rng.random((L + 1, K)) * 0.1, entry, rng.integers(1, K + 1, L + 1).astype(np.int32))
    costs += (rng.integers(0, 4, (L + 1, K)).astype(np.int8), rng.random(L + 1) * 0.1 if inputs else None)
    costs += [(1.0, 1.0), (0.75, 0.5), (0.3, 0.4)][seed % 3] if duplex else (1.0, 1.0)
    for _ in range(20):
        prices = np.zeros((6, n))
        prices[0] = rng.random(n) * (rng.random(n) < 0.7)
        prices[1] = rng.random(n) * rng.uniform(0.1, 0.5)
        prices[2] = rng.random(n) * 0.3 if duplex else 0.0
        if inputs:
            prices[3:, L:] = rng.random((3, L)) * np.array([[0.5], [0.1], [0.1]])
        given_prices = prices.copy()
        assert ascend(prices, 1, 0.1, 10, 0.4, *costs) == pytest.approx(_dual(given_prices, costs), rel=1e-9)
        assert (prices == given_prices).all()  # those of the best value, its only


def test_the_bound_knows_that_inputs_are_made_again_too() -> None:
    """Where nothing moves and one ā fills the memory, each backward needs all stages before it again."""
    chain = Chain(tuple(Stage("", 1.0, 1.0, 10, 100, 0) for _ in range(12)), 1e-3, 1e-3)
    limit = min_mem_limit(chain, "joint")
    assert lower_bound(chain, limit) > 1.5 * chain.compute_time


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


def test_the_bound_is_never_above_the_time_of_keeping_everything() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        stages = tuple(Stage("", rng.random(), rng.random() / 5, 10, 50) for _ in range(rng.randint(1, 30)))
        chain = Chain(stages, 1e9, 10.0, 10)
        trace = simulate(chain, keep_all(chain))
        assert lower_bound(chain, trace.peak_bytes) <= trace.makespan


def test_the_lowest_bound_of_several_chains_needs_few_long_ascents(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}
    for seed in range(4):
        chain = uneven(seed, 8)
        most = simulate(chain, keep_all(chain)).peak_bytes
        limits[chain] = int(0.9 * min_mem_limit(chain, "joint") + 0.1 * most)
    lowest = min(bounds.least_time_of(chain, limit) for chain, limit in limits.items())
    long: list[object] = []
    before = bounds.least_time_of
    monkeypatch.setattr(bounds, "least_time_of", lambda *args: long.append(args) or before(*args))
    assert bounds.least_time_of_any(limits) == lowest
    assert len(long) < len(limits)


def test_no_ascent_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = uneven(7, 9)
    limit = int(0.1 * min_mem_limit(chain, "joint") + 0.9 * simulate(chain, keep_all(chain)).peak_bytes)
    runs: list[object] = []

    def noted(prices: np.ndarray, *rest: object) -> float:
        runs.append((prices.tobytes(), *rest[:4]))
        return ascend(prices, *rest)

    monkeypatch.setattr(bounds, "ascend", noted)
    bounds.least_time_of_any({chain: limit})  # the cut at the turn-around does not bind: both starts are zeros
    assert len(set(runs)) == len(runs)
    assert {shrink for *_, shrink in runs} == {bounds.SHRINK}  # a quick bound chooses among chains
