"""Links whose directions slow each other down: the machine by hand, the search, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from random_programs import random_sequence
from thoroughness import examples

from rotoff import (
    Chain,
    Sequence,
    Stage,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.core.pipeline import orders, simulate_pipeline, stage_plan
from rotoff.solver import keep_all
from rotoff.solver.in_flight import turn

COSTS = [(4.0, 1.0, 10, 100), (6.0, 1.0, 10, 40), (1.0, 1.0, 10, 10), (1.0, 8.0, 1, 1)]
CHAIN = Chain(tuple(Stage("", *row) for row in COSTS), 10.0, 20.0)
BUSY = replace(CHAIN, d2h_bidirectional_bandwidth=5.0, h2d_bidirectional_bandwidth=16.0)
TEXT = (
    "F_all 1; offload abar 1; F_all 2; offload abar 2; F_all 3; free abar 1; prefetch abar 1; F_all 4; free abar 2; B 4;"
    " prefetch abar 2; wait abar 2; B 3; wait abar 1; B 2; B 1"
)


def spans(chain: Chain, text: str) -> list[tuple[str, float, float]]:
    trace = simulate(chain, Sequence.from_text(text.split("; ")))
    return [(str(e.op), e.start, e.end) for e in trace.events if e.lane != "compute"]


def test_copies_in_both_directions_slow_each_other_down_while_both_run() -> None:
    # ā_2 leaves while ā_1 returns: 100 bytes in at 16 B/s last 6.25 s, in which 5 B/s are 31.25 of its 40 bytes out.
    assert spans(BUSY, TEXT) == [
        ("offload abar 1", 4.0, 14.0),
        ("offload abar 2", 14.0, 14.0 + 6.25 + 0.875),
        ("prefetch abar 1", 14.0, 20.25),
        ("prefetch abar 2", 29.125, 31.125),
    ]
    assert spans(CHAIN, TEXT)[:3] == [
        ("offload abar 1", 4.0, 14.0),
        ("offload abar 2", 14.0, 18.0),
        ("prefetch abar 1", 14.0, 19.0),
    ]
    half = replace(BUSY, duplex=False)
    assert spans(half, TEXT) == spans(replace(CHAIN, duplex=False), TEXT)


@given(chains(most=5).flatmap(busy), st.integers(0, 10**9))
@examples(60)
def test_a_pipeline_of_one_rank_is_the_machine(chain: Chain, seed: int) -> None:
    plan = random_sequence(chain, seed)
    stage = stage_plan(chain, simulate(chain, plan), turn(plan.ops, len(chain)))
    run = simulate_pipeline([stage], orders("GPipe", 1, 1))
    assert run.makespan == pytest.approx(simulate(chain, plan).makespan, rel=1e-12)


WITH_OR_WITHOUT = st.one_of(chains(most=5), chains(most=4).flatmap(groups)).flatmap(busy)


@given(WITH_OR_WITHOUT.filter(lambda chain: min(chain.bidirectional_shares) < 1), st.sampled_from([0.0, 0.1, 0.3]))
@examples(25)
def test_the_plan_is_no_slower_than_the_one_for_a_link_that_is_not_busy(chain: Chain, share: float) -> None:
    least, peak = min_mem_limit(chain), simulate(chain, keep_all(chain)).peak_bytes
    limit = max(1, round(least + share * max(0, peak - least)))
    ours = solve(chain, limit, refine=0.01)
    free = replace(chain, d2h_bidirectional_bandwidth=None, h2d_bidirectional_bandwidth=None)
    theirs = simulate(chain, solve(free, limit, refine=0.01), limit).makespan
    assert ours.meta["makespan"] <= theirs * (1 + 1e-9)
    for mode in ("offload", "remat"):
        if limit >= min_mem_limit(chain, mode):
            assert ours.meta["makespan"] <= solve(chain, limit, mode, refine=0.01).meta["makespan"] * (1 + 1e-9)


def test_files_with_and_without_the_fields() -> None:
    assert Chain.from_dict(BUSY.to_dict()) == BUSY
    assert BUSY.to_dict()["h2d_bidirectional_bandwidth"] == 16.0
    assert not any("bidirectional" in name for name in CHAIN.to_dict())
    assert BUSY.bidirectional_shares == (0.5, 0.8)
    assert CHAIN.bidirectional_shares == (1.0, 1.0)
