"""How far `solve` is from the true optimum, by search over the machine's own states; and that refusals are honest."""

from __future__ import annotations

import math
import random
import time

import pytest
from oracles.every_step import fastest
from oracles.exhaustive import Search
from oracles.seeded import seeded_chain, seeded_group

from rotoff import lower_bound, min_mem_limit, simulate, solve
from rotoff.solver import keep_all

pytestmark = pytest.mark.full_search


def gaps(seed: int, stages: int, count: int, seconds: float) -> list[float]:
    """Relative distance from the optimum for each problem that the search could settle, as many as `seconds` allow."""
    rng, found, until = random.Random(seed), [], time.monotonic() + seconds
    for _ in range(count):
        chain = seeded_chain(rng, stages)
        least, peak = min_mem_limit(chain, "joint"), simulate(chain, keep_all(chain)).peak_bytes
        share = rng.choice([0.0, 0.1, 0.25, 0.5, 0.8])
        if peak <= least or time.monotonic() > until:
            continue
        limit = max(1, round(least + (peak - least) * share))
        ours = simulate(chain, solve(chain, limit, refine=0.05), limit).makespan
        optimum = Search(chain, limit).optimum(ours, 40_000)
        if optimum is not None:
            assert lower_bound(chain, limit) <= optimum * (1 + 1e-9)
            found.append((ours - optimum) / optimum if optimum else ours)
    return found


def report(found: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    equal = sum(gap <= 1e-9 for gap in found)
    with capsys.disabled():
        print(f"\n{equal} of {len(found)} chains at the true optimum, worst {100 * max(found):.2f} % off")
    assert equal >= 0.95 * len(found)
    assert max(found) <= 0.02


def test_three_stages_reach_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    report(gaps(seed=21, stages=3, count=80, seconds=20), capsys)


@pytest.mark.slow
def test_four_stages_reach_the_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    report(gaps(seed=22, stages=4, count=120, seconds=150), capsys)


@pytest.mark.parametrize("count", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_three_stages_with_parameters_reach_the_optimum(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    # Of all texts in which activations stay and all else moves at most once.
    rng, found = random.Random(23), []
    for _ in range(count):
        chain, updates = seeded_group(rng, 3), rng.choice(["during", "after"])
        least, peak = min_mem_limit(chain, "joint", updates), simulate(chain, keep_all(chain, updates)).peak_bytes
        limit = round(least + rng.choice([0.0, 0.2, 0.5]) * max(0, peak - least))
        ours = solve(chain, limit, updates=updates, refine=0.05).meta["makespan"]
        optimum = fastest(chain, limit, updates, ours)
        assert lower_bound(chain, limit, updates=updates) <= optimum * (1 + 1e-9)
        found.append(ours / optimum - 1)
    report(found, capsys)


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
