"""What solve returns passes the machine, in every mode, on any chain and limit; where it refuses, it says the truth."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups, seeded_chain, uneven
from oracles.exhaustive import Search
from thoroughness import examples

import rotoff
from rotoff import Chain, InfeasibleError, Stage, lower_bound, min_mem_limit, simulate, solve
from rotoff.core.sequence import MODES
from rotoff.solver import joint, keep_all
from rotoff.solver.plan_codes import evaluator, to_ops

pytestmark = pytest.mark.full_search

QUICK = 0.002  # seconds' worth of search


def limits_of(chain: Chain, share: float) -> dict[str, int]:
    """A limit for each mode between its smallest and the peak of keeping everything."""
    peak = simulate(chain, keep_all(chain)).peak_bytes
    return {mode: max(1, round(low + share * (peak - low))) for mode in MODES for low in [min_mem_limit(chain, mode)]}


FORWARDS = {"F_all", "F_sel", "F_ck", "F_none"}
ANY = st.one_of(chains(), chains(most=5).flatmap(groups)).flatmap(busy)


@pytest.mark.parametrize("mode", MODES)
@given(ANY, st.sampled_from(["during", "after"]), st.sampled_from([0.0, 0.02, 0.3, 0.7]))
@examples(60)
def test_there_is_a_plan_from_the_smallest_limit_on(mode: str, chain: Chain, updates: str, share: float) -> None:
    """It passes the machine, and the pure modes are pure; one byte below there is none."""
    least = min_mem_limit(chain, mode, updates)
    peak = simulate(chain, keep_all(chain, updates)).peak_bytes
    for limit in {max(1, least), max(1, round(least + share * max(0, peak - least)))}:
        for refine in (False, QUICK):
            made = solve(chain, limit, mode, mem_slots=20, refine=refine, updates=updates)
            trace = simulate(chain, made, limit, updates)
            assert (made.mode, made.mem_limit, made.meta["makespan"]) == (mode, limit, trace.makespan)
            assert trace.makespan >= lower_bound(chain, limit, updates=updates) * (1 - 1e-9)
            if mode == "remat":
                assert {op.kind.value for op in made} <= FORWARDS | {"B", "U", "drop"}
            if mode == "offload":
                forwards = [str(op) for op in made if op.kind.value in FORWARDS]
                assert forwards == [f"F_all {i}" for i in range(1, len(chain) + 1)]
    if least > 1 and peak >= least:
        with pytest.raises(InfeasibleError, match=f"{least} bytes.* in mode {mode}") as caught:
            solve(chain, least - 1, mode, mem_slots=20, refine=False, updates=updates)
        assert caught.value.min_mem_limit == least


@given(chains())
def test_nothing_is_done_when_all_fits(chain: Chain) -> None:
    everything = keep_all(chain)
    peak = simulate(chain, everything).peak_bytes
    for mode in MODES:
        for limit in (peak, peak + 1, 2 * peak):
            if limit > 0:
                assert solve(chain, limit, mode).ops == everything.ops


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


# -- the compiled decoder against the machine: the same step time and the same peaks, for any table of codes


@given(chains().flatmap(busy), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_decoded_plans_are_what_the_machine_sees(chain: Chain, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16 * 4, size=(len(chain) + 1, 4)).astype(np.int16)
    codes[0] = rng.integers(0, 2)
    peak = simulate(chain, keep_all(chain)).peak_bytes
    least = min_mem_limit(chain, "joint")
    limit = max(1, round(least + share * max(0, peak - least)))
    decoder = evaluator(chain, limit, 4, host_limit=0)
    makespan, over, host = decoder.judge(codes.ravel())
    if math.isinf(makespan):
        return
    trace = simulate(chain, to_ops(decoder.text(codes.ravel())))
    assert (trace.makespan, trace.host_peak_bytes) == (makespan, host)
    assert max(0, trace.peak_bytes - limit) == over


@pytest.mark.parametrize("mode", MODES)
@examples(12)
@given(chain=chains(least=2, most=8), part=st.floats(0.1, 0.95))
def test_forms_never_make_a_plan_slower(mode: str, chain: Chain, part: float) -> None:
    plain = replace(chain, stages=tuple(replace(stage, forms=()) for stage in chain.stages))
    limit = limits_of(plain, part)[mode]
    after, before = (solve(one, limit, mode, refine=0.1) for one in (chain, plain))
    assert min_mem_limit(chain, mode) <= max(1, min_mem_limit(plain, mode))
    assert after.meta["makespan"] <= before.meta["makespan"] * (1 + 1e-12)


# -- ctrl-C stops a long solve at once, in the tables and in the search


LONG = uneven(1, 200)
LIMIT = int(rotoff.simulate(LONG, rotoff.keep_all(LONG)).peak_bytes * 0.4)


@pytest.mark.parametrize(
    "work",
    [
        lambda: joint.solve_slots(LONG, LIMIT, 50, "up"),
        lambda: rotoff.solve(LONG, LIMIT, refine=120),
    ],
    ids=["tables", "search"],
)
def test_an_interrupt_stops_it_within_a_second(work: Callable[[], object]) -> None:
    sent = []

    def interrupt() -> None:
        sent.append(time.process_time())  # which other work on the machine does not lengthen
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(1.5, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.process_time() - sent[0] < 1


# -- plans for long, very uneven chains pass the machine: the search's own evaluator and the machine must not part


@pytest.mark.slow
def test_a_long_chain_is_near_the_bound() -> None:
    """The tables are fine enough for its stages, and the search grows with it."""
    chain = uneven(5, 400)
    limit = int(rotoff.simulate(chain, rotoff.keep_all(chain)).peak_bytes * 0.4)
    assert (
        rotoff.solve(chain, limit, "remat").meta["makespan"]
        < rotoff.lower_bound(chain, limit) + 0.03 * chain.compute_time
    )


# -- how far `solve` is from the true optimum, by search over the machine's own states; and that refusals are honest


def gaps(seed: int, stages: int, count: int) -> list[float]:
    """Relative distance from the optimum for each problem that the search could settle."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        chain = seeded_chain(rng, stages)
        least, peak = min_mem_limit(chain, "joint"), simulate(chain, keep_all(chain)).peak_bytes
        share = rng.choice([0.0, 0.1, 0.25, 0.5, 0.8])
        if peak <= least:
            continue
        limit = max(1, round(least + (peak - least) * share))
        ours = simulate(chain, solve(chain, limit, refine=0.05), limit).makespan
        optimum = Search(chain, limit).optimum(ours, 40_000)
        if optimum is not None:
            assert lower_bound(chain, limit) <= optimum * (1 + 1e-9)
            found.append((ours - optimum) / optimum if optimum else ours)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "seed", "count"), [(3, 21, 80), (4, 22, 40)])
def test_short_chains_reach_the_optimum(stages: int, seed: int, count: int) -> None:
    found = gaps(seed, stages, count)
    assert sum(gap <= 1e-9 for gap in found) >= 0.95 * len(found)
    assert max(found) <= 0.02


@pytest.mark.parametrize(
    ("stages", "mode"), [(2, "joint"), (2, "remat"), (3, "remat"), pytest.param(3, "joint", marks=pytest.mark.slow)]
)
def test_nothing_fits_one_byte_below_the_minimum(stages: int, mode: str) -> None:
    rng = random.Random(31)
    for _ in range(40):
        chain = seeded_chain(rng, stages)
        least = min_mem_limit(chain, mode)
        if least > 1:
            assert Search(chain, least - 1, moves=mode == "joint").optimum(math.inf, 100_000) in (math.inf, None)
