"""`solve` on chains with parameters: within the host's limit, and faster than what stands beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rotoff import (
    Chain,
    InfeasibleError,
    ParameterGroup,
    Stage,
    keep_all,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.solver.bounds import host_plan
from rotoff.solver.placement import host_step

pytestmark = pytest.mark.full_search

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
    limit = min_mem_limit(chain, "joint", updates)
    plan = host_plan(chain, limit, updates)
    assert plan is not None
    one_by_one = simulate(chain, host_step(chain, plan, updates)).makespan
    assert solve(chain, limit, updates=updates, refine=0.1).meta["makespan"] < 0.6 * one_by_one


@pytest.mark.parametrize(("updates", "share"), [("during", 0.484), ("after", 0.554)])
def test_groups_that_do_not_fit_together_are_searched_with_little_heat(updates: str, share: float) -> None:
    groups = tuple(ParameterGroup((i,), 100, 100, 200, update_time=0.1) for i in range(1, 25) for _ in range(3))
    chain = Chain((Stage("", 1.0, 2.0, 8, 140, backward_transient_bytes=33),) * 24, 50.0, 50.0, parameters=groups)
    limit = min_mem_limit(chain, "joint", updates)
    plan = host_plan(chain, limit, updates)
    assert plan is not None
    one_by_one = simulate(chain, host_step(chain, plan, updates)).makespan
    assert solve(chain, limit, updates=updates, refine=0.05).meta["makespan"] < share * one_by_one
