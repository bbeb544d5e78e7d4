"""Many limits at once, and limits on the host."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains, groups
from thoroughness import examples

from rotoff import Chain, InfeasibleError, Stage, min_mem_limit, simulate, solve
from rotoff.solver import sweep

pytestmark = pytest.mark.full_search

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
