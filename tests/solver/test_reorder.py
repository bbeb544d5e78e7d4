"""The last search of a plan: the order of its operations."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from rotoff import Chain, ParameterGroup, Sequence, Stage, min_mem_limit, parse, simulate, solve
from rotoff.solver.anneal import Budget
from rotoff.solver.placed_search import PlacedProblem, searched, sequence_of
from rotoff.solver.reorder import _orders, in_order, reordered


def drawn(seed: int, duplex: bool, shared: bool) -> Chain:
    rng = np.random.default_rng(seed)
    stages, groups = [], []
    for i in range(1, 8):
        out, time = int(rng.integers(1, 40)), float(rng.uniform(0.5, 4))
        stages.append(Stage(f"s{i}", time, 2 * time, out, out + int(rng.integers(0, 200)), None, out // 2, None, out))
        size, numbers = int(rng.integers(1, 200)), (1, i) if i in (3, 6) else (i,)
        on_host = None if i == 4 else size / 20
        frozen = i == 5
        sizes = (size, 0, 0, 0.0, None) if frozen else (size, size, 2 * size, size / 1000, on_host)
        groups.append(ParameterGroup(numbers, *sizes))
    slower = {"d2h_bidirectional_bandwidth": 40.0, "h2d_bidirectional_bandwidth": 30.0} if shared else {}
    return Chain(tuple(stages), 50.0, 50.0, 10, 0, duplex, **slower, parameters=tuple(groups))


def planned(chain: Chain, updates: str) -> tuple[PlacedProblem, Sequence]:
    limit = int(1.05 * min_mem_limit(chain, "joint", updates))
    problem = PlacedProblem(chain, limit, None, "joint", updates)
    return problem, sequence_of(problem, searched(problem, Budget(0.02), [])[0])


@pytest.mark.parametrize(
    ("duplex", "shared", "updates"), [*product((True, False), (False,), ("during", "after")), (True, True, "during")]
)
def test_every_order_is_legal_and_takes_what_the_machine_says(duplex: bool, shared: bool, updates: str) -> None:
    crossed = False
    for seed in range(2):
        chain = drawn(seed, duplex, shared)
        problem, plan = planned(chain, updates)
        for turn in range(5):  # so hot that whatever is legal is taken
            kernel, order = _orders(problem, plan)[0], np.arange(len(plan), dtype=np.int32)
            kernel.anneal(order, 200, 1 + turn, 1e9, 1e9, order.copy(), np.zeros(1, np.int8))
            assert (order != np.arange(len(plan))).any()
            before, plan = plan, in_order(plan, order)
            assert simulate(chain, plan, problem.limit, updates).makespan == kernel.seconds(order)
            crossed |= set(before.resident) != set(plan.resident)
    assert crossed


def test_where_values_are_large_another_order_is_faster() -> None:
    gained = 0
    for seed in range(4):
        chain = drawn(seed, duplex=False, shared=False)
        problem, plan = planned(chain, "during")
        seconds, made = reordered(problem, plan, Budget(0.05))
        before = simulate(chain, plan, problem.limit).makespan
        after = simulate(chain, made, problem.limit).makespan
        assert after == seconds
        assert after <= before
        assert sorted(map(str, made)) == sorted(map(str, plan))
        gained += after < 0.995 * before
    assert gained >= 2


def test_the_limit_on_the_host_holds_in_every_order() -> None:
    problem, plan = planned(drawn(0, duplex=True, shared=False), "during")
    held = simulate(problem.chain, plan).host_peak_bytes
    _, made = reordered(replace(problem, host_limit=held), plan, Budget(0.05))
    assert simulate(problem.chain, made, problem.limit).host_peak_bytes <= held


def test_a_copy_out_may_wait_for_the_next_step() -> None:
    """Copies in are slow beside copies out, so o 1 leaves in the next step, when nothing comes in."""
    stage = Stage("s", 9.2, 3.6, 162, 162, backward_transient_bytes=200)
    sizes = ((1, 444, 889, 1.3, None), (2, 274, 873, 0.0, 8.4), (2, 351, 701, 0.0, 2.3))
    groups = tuple(ParameterGroup((i,), size, size, state, here, host) for i, size, state, here, host in sizes)
    chain = Chain((stage,) * 3, 71.3, 71.3, 19, h2d_bidirectional_bandwidth=30.9, parameters=groups)
    text = """F_all 1; wait w 2; wait w 3; drop w 1; offload o 1; F_all 2; F_all 3; drop o 1; B 3; B 2; drop w 3;
        prefetch w 1; offload g 3; drop w 2; free g 3; wait w 1; offload g 2; B 1; prefetch o 1; H 2; H 3; wait o 1;
        free g 2; prefetch w 2; U 1; prefetch w 3; offload w 1"""
    known = Sequence(tuple(map(parse, text.split(";"))), resident=("w 1", "w 2", "w 3", "o 1"))
    trace = simulate(chain, known, updates="after")
    plan = solve(chain, trace.peak_bytes, updates="after")
    assert simulate(chain, plan, trace.peak_bytes, "after").makespan <= trace.makespan * (1 + 1e-9)
