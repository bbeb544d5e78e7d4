"""Plans for long, very uneven chains pass the machine: the search's own evaluator and the machine must not part."""

from __future__ import annotations

import random

import pytest
from oracles.chains import uneven

import rotoff
from rotoff.solver.host import all_moving
from rotoff.solver.search import judged

pytestmark = pytest.mark.full_search


@pytest.mark.parametrize(("seed", "stages", "fraction"), [(2, 60, 0.3), (2, 60, 0.2), (3, 40, 0.3)])
def test_what_is_returned_passes_the_machine(seed: int, stages: int, fraction: float) -> None:
    chain = uneven(seed, stages)
    limit = int(rotoff.simulate(chain, rotoff.keep_all(chain)).peak_bytes * fraction)
    try:
        sequence = rotoff.solve(chain, limit)
    except rotoff.InfeasibleError as error:
        assert error.min_mem_limit > limit
    else:
        rotoff.simulate(chain, sequence, limit)


def even(stages: int) -> rotoff.Chain:
    """Saved sets of one to five outputs, each of which the link moves in about a stage's time."""
    rng = random.Random(stages)
    found = []
    for i in range(stages):
        times = 0.01 * (1 + rng.random()), 0.02 * (1 + rng.random())
        output = rng.randint(10**7, 10**8)
        found.append(rotoff.Stage(f"{i}", *times, output, output * rng.randint(1, 5), checkpoint_transient_bytes=10**6))
    return rotoff.Chain(tuple(found), 12e9, 12e9, input_bytes=10**7)


@pytest.mark.parametrize("share", [1.0, 1.02])
def test_long_chains_have_good_plans_near_the_minimum(share: float) -> None:
    chain = even(300)
    limit = int(rotoff.min_mem_limit(chain, "joint") * share)
    plans = [judged(chain, limit, codes, "all-moving") for codes in all_moving(chain, limit)]
    assert min(plan.makespan for plan in plans if plan is not None) < 1.25 * chain.compute_time


def test_nothing_is_tried_after_a_plan_that_nothing_can_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(*_: object) -> None:
        raise AssertionError("the dynamic programs ran")

    monkeypatch.setattr("rotoff.solver.remat.solve_slots", tried)
    monkeypatch.setattr("rotoff.solver.joint.solve_slots", tried)
    chain = even(400)
    sequence = rotoff.solve(chain, rotoff.simulate(chain, rotoff.keep_all(chain)).peak_bytes // 2)
    assert sequence.meta["makespan"] == pytest.approx(chain.compute_time, rel=1e-9)


def test_a_long_chain_is_near_the_bound() -> None:
    """The tables are fine enough for its stages, and the search grows with it."""
    chain = uneven(5, 400)
    limit = int(rotoff.simulate(chain, rotoff.keep_all(chain)).peak_bytes * 0.4)
    assert (
        rotoff.solve(chain, limit, "remat").meta["makespan"]
        < rotoff.lower_bound(chain, limit) + 0.03 * chain.compute_time
    )
