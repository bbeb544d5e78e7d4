"""The last search of a plan: the order of its operations."""

import random

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from random_programs import placed
from thoroughness import examples

from rotoff import Chain, OpKind, ParameterGroup, Sequence, Stage, parse, simulate, solve
from rotoff.solver.anneal import Budget, Problem
from rotoff.solver.reorder import _orders, in_order


@given(
    chains(most=5).flatmap(groups).flatmap(busy).filter(lambda chain: chain.parameters),
    st.integers(0, 10**9),
    st.sampled_from(["during", "after"]),
)
@examples(60)
def test_every_order_is_legal_and_takes_what_the_machine_says(chain: Chain, seed: int, updates: str) -> None:
    plan = placed(chain, random.Random(seed), updates)
    assume(any(op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH) for op in plan))
    trace = simulate(chain, plan, updates=updates)
    problem = Problem(chain, max(1, trace.peak_bytes), trace.host_peak_bytes, 50, Budget(0.0), updates)
    for turn in range(5):  # so hot that whatever is legal is taken
        kernel, order = _orders(problem, plan)[0], np.arange(len(plan), dtype=np.int32)
        kernel.anneal(order, 200, 1 + turn, 1e9, 1e9, order.copy(), np.zeros(1, np.int8))
        plan = in_order(plan, order)
        trace = simulate(chain, plan, problem.limit, updates)
        assert trace.makespan == kernel.seconds(order)
        assert trace.host_peak_bytes <= (problem.host_limit or 0)


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
