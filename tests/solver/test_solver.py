"""What solve returns passes the machine, in every mode, on any chain and limit; where it refuses, it says the truth."""

from __future__ import annotations

import csv
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups, uneven
from oracles.exhaustive import Search
from thoroughness import examples

import rotoff
from rotoff import (
    Chain,
    InfeasibleError,
    ParameterGroup,
    Stage,
    keep_all,
    lower_bound,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.core.sequence import MODES
from rotoff.solver import joint, sweep
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


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "count"), [(3, 80), (4, 40)])
def test_short_chains_reach_the_optimum(stages: int, count: int) -> None:
    found: list[float] = []  # relative distances, where the search could settle it

    @settings(max_examples=count)
    @given(chains(least=stages, most=stages, forms=stages < 4), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8]))
    def look(chain: Chain, share: float) -> None:
        least, peak = min_mem_limit(chain), simulate(chain, keep_all(chain)).peak_bytes
        limit = max(1, round(least + max(0, peak - least) * share))
        ours = simulate(chain, solve(chain, limit, refine=0.05), limit).makespan
        optimum = Search(chain, limit).optimum(ours, 40_000) if peak > least else None
        if optimum is not None:
            assert lower_bound(chain, limit) <= optimum * (1 + 1e-9)
            found.append((ours - optimum) / optimum if optimum else ours)

    look()
    assert len(found) >= 15
    assert sum(gap <= 1e-9 for gap in found) >= 0.95 * len(found)
    assert max(found) <= 0.02


@pytest.mark.parametrize(
    ("stages", "mode"), [(2, "joint"), (2, "remat"), (3, "remat"), pytest.param(3, "joint", marks=pytest.mark.slow)]
)
@examples(40)
@given(st.data())
def test_nothing_fits_one_byte_below_the_minimum(stages: int, mode: str, data: st.DataObject) -> None:
    chain = data.draw(chains(least=stages, most=stages))
    least = min_mem_limit(chain, mode)
    if least > 1:
        assert Search(chain, least - 1, moves=mode == "joint").optimum(math.inf, 100_000) in (math.inf, None)


# -- many limits at once, and limits on the host


CHAIN = Chain(tuple(Stage("", 1.0, 2.0, 10, 30) for _ in range(8)), 20.0, 20.0, input_bytes=5)


def test_rows_table_and_csv(tmp_path: Path) -> None:
    seen: list[float] = []
    found = sweep(CHAIN, [60, "100 B", 200, 300], ("joint", "remat"), refine=0.05, progress=lambda x, _: seen.append(x))
    assert [(row.limit, row.mode) for row in found] == [(b, m) for m in ("joint", "remat") for b in (60, 100, 200, 300)]
    assert seen[-1] == 1.0
    for row, sequence in zip(found, found.sequences, strict=True):
        if sequence is None:
            assert row.limit < min_mem_limit(CHAIN, row.mode)
        else:
            assert row.makespan == simulate(CHAIN, sequence, row.limit).makespan
    assert len(str(found).splitlines()) == 1 + len(found)
    assert "does not fit" in str(found)
    found.save(tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [int(row["limit"]) for row in rows] == [row.limit for row in found]


@given(st.one_of(chains(least=2, most=6), chains(most=5).flatmap(groups)), st.sampled_from(["during", "after"]))
@examples(60)
def test_neither_more_memory_nor_joint_is_slower(chain: Chain, updates: str) -> None:
    times: dict[str, list[float]] = {mode: [] for mode in ("joint", "remat", "offload")}
    table = sweep(chain, None, refine=0.001, updates=updates)
    for row, sequence in zip(table, table.sequences, strict=True):
        times[row.mode].append(math.inf if row.makespan is None else row.makespan)
        assert sequence is None or simulate(chain, sequence, row.limit, updates).makespan == row.makespan
    for found in times.values():
        assert found == sorted(found, reverse=True)
        assert all(joint <= other for joint, other in zip(times["joint"], found, strict=True))


def test_a_host_limit_is_kept() -> None:
    free = solve(CHAIN, 120, refine=0.1)
    assert free.meta["host_peak_bytes"] > 30
    times = [free.meta["makespan"]]
    for host in (60, 30, 0):
        sequence = solve(CHAIN, 120, refine=0.1, host_limit=host)
        trace = simulate(CHAIN, sequence, 120)
        assert trace.host_peak_bytes <= host
        times.append(trace.makespan)
    assert times == sorted(times)
    with pytest.raises(InfeasibleError, match="on the host"):
        solve(CHAIN, 120, "offload", refine=0.1, host_limit=0)


def test_a_lone_limit_or_mode_is_one() -> None:
    assert [row.limit for row in sweep(CHAIN, "100 B", "remat", refine=False)] == [100]
    assert [row.mode for row in sweep(CHAIN, 200, ("remat",), refine=False, policies="vdnn")] == ["remat", "vdnn"]


def test_a_host_limit_beyond_64_bits_is_no_limit() -> None:
    plain, huge = (solve(CHAIN, 120, refine=0.01, host_limit=host) for host in (None, 2**63))
    assert plain.ops == huge.ops


# -- chains with parameters: within the host's limit, and faster than what stands beside it


WHEN = ("during", "after")
LITTLE = 0.01  # of the default effort


def transformer(layers: int = 8, host: float | None = 2.0) -> Chain:
    """Blocks of which parameters, gradients and states outweigh the activations; times in units of one forward."""
    stage = Stage("block", 1.0, 2.0, 10, 120, backward_transient_bytes=20)
    group = ParameterGroup((1,), 100, 100, 200, update_time=0.1, host_update_time=host)
    groups = tuple(replace(group, stages=(i,)) for i in range(1, layers + 1))
    return Chain((stage,) * layers, 100.0, 100.0, input_bytes=10, parameters=groups)


@pytest.mark.parametrize(("updates", "share", "better"), [("during", 0.4, 0.95), ("after", 0.4, 0.95)])
@pytest.mark.grid
def test_it_is_better_than_what_people_place_by_hand(updates: str, share: float, better: float) -> None:
    chain = replace(transformer(), d2h_bandwidth=60.0, h2d_bandwidth=60.0)
    limit = int(share * simulate(chain, keep_all(chain)).peak_bytes)
    ours = solve(chain, limit, updates=updates, refine=0.1).meta["makespan"]
    for policy in ("by-hand", "streaming", "zero-offload", "block-swap"):
        try:
            theirs = solve(chain, limit, policy=policy, updates=updates, effort=False).meta["makespan"]
        except InfeasibleError:
            continue
        assert ours <= better * theirs


def test_equal_inputs_give_equal_sequences() -> None:
    chain = transformer()
    first, second = (solve(chain, 2000, refine=LITTLE) for _ in range(2))
    assert first == second
    assert first.resident
    assert any(op.of == "w" for op in first)


def test_a_host_limit_holds_for_parameters_too() -> None:
    chain = transformer(4)
    free = solve(chain, 1000, refine=LITTLE)
    limit = free.meta["host_peak_bytes"]
    assert solve(chain, 1000, refine=LITTLE, host_limit=limit).meta["host_peak_bytes"] <= limit
    with pytest.raises(InfeasibleError, match="on the host"):
        solve(chain, 1000, refine=LITTLE, host_limit=100)


def test_an_update_on_the_host_may_save_time_where_everything_fits() -> None:
    chain = transformer(host=0.01)
    everything = simulate(chain, keep_all(chain))
    made = solve(chain, 10 * everything.peak_bytes, refine=0.1)
    assert made.meta["makespan"] < everything.makespan
    assert solve(transformer(host=None), 10 * everything.peak_bytes).meta["source"] == "keep-all"


@pytest.mark.parametrize("updates", WHEN)
def test_groups_of_one_stage_make_room_for_each_other_s_updates(updates: str) -> None:
    # At the smallest limit a backward fits with all of its stage's groups, but an update only with nothing of the
    # others' parameters.
    groups = tuple(ParameterGroup((i,), 100, 100, 200, update_time=0.1) for i in (1, 2, 3) for _ in range(2))
    chain = Chain((Stage("", 1.0, 2.0, 10, 90),) * 3, 100.0, 100.0, parameters=groups)
    limit, one_copy_at_a_time = min_mem_limit(chain, "joint", updates), 79.3
    assert solve(chain, limit, updates=updates, refine=0.1).meta["makespan"] < 0.6 * one_copy_at_a_time


@pytest.mark.parametrize(("updates", "share"), [("during", 0.484), ("after", 0.554)])
def test_groups_that_do_not_fit_together_are_searched_with_little_heat(updates: str, share: float) -> None:
    groups = tuple(ParameterGroup((i,), 100, 100, 200, update_time=0.1) for i in range(1, 25) for _ in range(3))
    chain = Chain((Stage("", 1.0, 2.0, 8, 140, backward_transient_bytes=33),) * 24, 50.0, 50.0, parameters=groups)
    limit, one_copy_at_a_time = min_mem_limit(chain, "joint", updates), 1812.52
    assert solve(chain, limit, updates=updates, refine=0.05).meta["makespan"] < share * one_copy_at_a_time
