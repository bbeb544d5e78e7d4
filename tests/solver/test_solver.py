"""What solve returns passes the machine, in every mode, on any chain and limit; where it refuses, it says the truth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains

from rotoff import Chain, InfeasibleError, LimitError, OptionError, Stage, lower_bound, min_mem_limit, simulate, solve
from rotoff.solver import keep_all
from rotoff.solver.bounds import MODES

pytestmark = pytest.mark.full_search

QUICK = 0.002  # seconds' worth of search


def limits_of(chain: Chain, share: float) -> dict[str, int]:
    """A limit for each mode between its smallest and the peak of keeping everything."""
    peak = simulate(chain, keep_all(chain)).peak_bytes
    return {mode: max(1, round(low + share * (peak - low))) for mode in MODES for low in [min_mem_limit(chain, mode)]}


@given(chains(), st.sampled_from([0.0, 0.02, 0.3, 0.7]))
def test_every_mode_passes_the_machine(chain: Chain, share: float) -> None:
    for mode, limit in limits_of(chain, share).items():
        for refine in (False, QUICK):
            sequence = solve(chain, limit, mode, mem_slots=20, refine=refine)
            trace = simulate(chain, sequence, limit)
            assert (sequence.mode, sequence.mem_limit) == (mode, limit)
            assert sequence.meta["makespan"] == trace.makespan
            assert trace.makespan >= lower_bound(chain, limit) * (1 - 1e-9)


@given(chains())
def test_one_byte_below_the_minimum_is_refused(chain: Chain) -> None:
    for mode in MODES:
        least = min_mem_limit(chain, mode)
        if least > 1:
            with pytest.raises(InfeasibleError, match=f"{least} bytes.* in mode {mode}") as caught:
                solve(chain, least - 1, mode, mem_slots=20, refine=False)
            assert caught.value.min_mem_limit == least


@given(chains(), st.sampled_from([0.0, 0.2, 0.5, 0.8]))
def test_joint_is_never_slower_than_the_pure_modes(chain: Chain, share: float) -> None:
    for limit in limits_of(chain, share).values():
        times = {}
        for mode in MODES:
            try:
                times[mode] = simulate(chain, solve(chain, limit, mode, mem_slots=20, refine=QUICK), limit).makespan
            except InfeasibleError:
                continue
        if times:
            assert times["joint"] == min(times.values())


@given(chains())
def test_nothing_is_done_when_all_fits(chain: Chain) -> None:
    everything = keep_all(chain)
    peak = simulate(chain, everything).peak_bytes
    for mode in MODES:
        for limit in (peak, peak + 1, 2 * peak):
            if limit > 0:
                assert solve(chain, limit, mode).ops == everything.ops


@given(chains(least=2), st.sampled_from([0.1, 0.5]))
def test_same_input_same_sequence(chain: Chain, share: float) -> None:
    for mode, limit in limits_of(chain, share).items():
        first, second = (solve(chain, limit, mode, refine=QUICK) for _ in range(2))
        assert first.ops == second.ops


@given(chains(), st.sampled_from([0.0, 0.3]))
def test_pure_modes_are_pure(chain: Chain, share: float) -> None:
    limits = limits_of(chain, share)
    remat = {op.kind.value for op in solve(chain, limits["remat"], "remat", refine=QUICK)}
    assert remat <= {"F_all", "F_sel", "F_ck", "F_none", "B", "drop"}
    offload = [op for op in solve(chain, limits["offload"], "offload", refine=QUICK) if op.kind.value.startswith("F_")]
    assert [str(op) for op in offload] == [f"F_all {i}" for i in range(1, len(chain) + 1)]


CHAIN = Chain((Stage("one", 1.0, 2.0, 10, 30), Stage("two", 1.0, 2.0, 10, 30)), 10.0, 10.0, input_bytes=5)


def test_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match="'joint', 'remat', 'offload'"):
        solve(CHAIN, 100, "rotor")
    for slots in (0, -1, 2.5, True, "50"):
        with pytest.raises(OptionError, match="mem_slots"):
            solve(CHAIN, 100, mem_slots=slots)
    for refine in (-1, float("nan"), "yes"):
        with pytest.raises(OptionError, match="refine"):
            solve(CHAIN, 100, refine=refine)
    with pytest.raises(LimitError):
        solve(CHAIN, 0.5)


def test_a_long_chain_needs_no_recursion() -> None:
    chain = Chain(tuple(Stage("", 1.0, 2.0, 10, 30) for _ in range(1200)), 10.0, 10.0, input_bytes=5)
    limit = simulate(chain, keep_all(chain)).peak_bytes // 2
    assert simulate(chain, solve(chain, limit, "offload", refine=0.1), limit).makespan > 0


def test_a_limit_one_byte_too_small_for_everything_is_used_as_well_as_a_smaller_one() -> None:
    """A plan over the limit by one byte of terabytes must not hold the search; what fits is much slower here."""
    large = Stage("large", 0.8, 1.1, 14 * 10**12, 52 * 10**12, None, 14 * 10**12, 29 * 10**12, 4 * 10**12)
    chain = Chain((large, Stage("small", 0.8, 1.9, 10**12, 5 * 10**12)), 37e12, 370e12, input_bytes=14 * 10**12)
    peak = simulate(chain, keep_all(chain)).peak_bytes
    below = solve(chain, peak - 3 * 10**11, refine=0.1).meta["makespan"]
    assert chain.compute_time < solve(chain, peak - 1, refine=0.1).meta["makespan"] <= below


def test_the_search_ends_at_what_nothing_beats() -> None:
    """With a link that hides every copy the proposals take no longer than the compute; any effort is then enough."""
    chain = Chain(tuple(Stage(f"s{i}", 0.01, 0.02, 10, 100) for i in range(12)), 1e6, 1e6)
    limit = simulate(chain, keep_all(chain)).peak_bytes * 2 // 3
    shares: list[float] = []
    sequence = solve(chain, limit, mode="offload", refine=1e9, progress=lambda share, _: shares.append(share))
    assert sequence.meta["makespan"] == pytest.approx(chain.compute_time, rel=1e-12)
    assert shares == [1.0]
