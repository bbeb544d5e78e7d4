"""Euro-Par 2020, theorems 1 and 3: positive instances run without idle time, negative ones do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.fractional_program import fractional
from oracles.partition_instances import ordered_out, three_partition, times_of_all_orders, triples, two_partition
from thoroughness import examples

from rotoff import lower_bound, simulate, solve
from rotoff.solver.policies.dynprog import discretize
from rotoff.solver.policies.dynprog import optimum as program

pytestmark = pytest.mark.full_search

POSITIVE = ([4, 5, 6, 5, 5, 5], [3, 4, 5, 5, 4, 3], [6, 5, 4, 6, 5, 4, 7, 4, 4])
NEGATIVE = ([4, 4, 4, 6, 6, 6], [5, 5, 5, 5, 5, 7])


@pytest.mark.parametrize("numbers", POSITIVE)
def test_a_partition_into_triples_is_a_schedule_without_idle_time(numbers: list[int]) -> None:
    chain, limit, T = three_partition(numbers)
    parts = triples(numbers)
    assert parts is not None
    trace = simulate(chain, ordered_out(chain, limit, [x + 1 for part in parts for x in part]), limit)
    assert (trace.makespan, trace.idle_time) == (pytest.approx(T), pytest.approx(0.0, abs=1e-9))
    assert trace.d2h_bytes == trace.h2d_bytes == sum(numbers)


@pytest.mark.parametrize("numbers", POSITIVE)
def test_the_solver_finds_it_where_the_triples_come_in_order(numbers: list[int]) -> None:
    parts = triples(numbers)
    assert parts is not None
    chain, limit, T = three_partition([numbers[x] for part in parts for x in part])
    for policy in ("greedy", "dynprog", "autoswap"):
        assert solve(chain, limit, policy=policy).meta["makespan"] == pytest.approx(T)
    assert solve(chain, limit, "offload").meta["makespan"] == pytest.approx(T)


@pytest.mark.parametrize("numbers", [*POSITIVE[:2], *NEGATIVE])
@pytest.mark.grid
def test_an_order_without_idle_time_exists_for_positive_instances_only(numbers: list[int]) -> None:
    chain, limit, T = three_partition(numbers)
    best = min(times_of_all_orders(chain, limit, numbers))
    assert (best <= T * (1 + 1e-9)) == (triples(numbers) is not None)
    # Bytes that may be cut have no such trouble (Theorem 2).
    assert fractional.optimum(chain, limit).makespan == pytest.approx(T)


@pytest.mark.parametrize("numbers", NEGATIVE)
def test_nothing_claims_a_negative_instance(numbers: list[int]) -> None:
    chain, limit, T = three_partition(numbers)
    found = solve(chain, limit, "offload").meta["makespan"]
    assert found > T * (1 + 1e-6)
    assert lower_bound(chain, limit) <= T * (1 + 1e-9) < found


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7).filter(lambda u: sum(u) % 2 == 0))
@examples(100)
def test_theorem_3_the_program_decides_2_partition(numbers: list[int]) -> None:
    chain, limit, T = two_partition(numbers)
    reachable = {0}
    for u in numbers:
        reachable |= {x + u for x in reachable}
    found = program(discretize(chain, limit, limit))
    assert found is not None
    idle, out = found
    assert (idle == 0) == (T / 2 in reachable)
    if idle == 0:
        assert sum(numbers[i - 1] for i in out) == T / 2
    made = fractional.timeline(chain, limit, [float(i in out) * chain.output_bytes(i) for i in range(len(chain) + 1)])
    assert made is not None and made.makespan == pytest.approx(T + idle)
