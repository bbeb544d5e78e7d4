"""The kernel that decodes steps with parameters, against the machine: seconds, bytes and what is legal, for plans of
any kind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from random_programs import placed
from thoroughness import examples

from rotoff import Chain, OpKind, ParameterGroup, Sequence, Stage, parse, simulate, solve
from rotoff.solver.anneal import Budget, Problem
from rotoff.solver.placed_search import (
    EVERYWHERE,
    FLAGS,
    GRADIENT_LEAVES,
    MASK,
    ON_HOST,
    STATE_LEAVES,
    at_home,
    joined,
    placer,
    to_sequence,
)
from rotoff.solver.plan_codes import empty, with_residents
from rotoff.solver.reorder import _orders

VISITS = 4


def random_plan(chain: Chain, rng: random.Random) -> np.ndarray:
    codes, genes = empty(chain, VISITS), at_home(chain)
    for q in range(1, len(chain) + 1):
        for v in range(VISITS):
            kind = rng.choice([0, 1, 1, 1 + rng.randrange(1 + len(chain.stage(q).forms))])
            codes[q, v] = kind << 4 | rng.randrange(2) | rng.choice([0, 0, 2]) | rng.choice([0] * 6 + [4, 8])
    for gene in genes:
        gene[:] = rng.randrange(1 << 13), rng.randrange(8), rng.randint(-1, len(chain) + 1), rng.randint(-3, 3)
    return joined(codes, genes)


@given(
    chains(most=6).flatmap(groups).flatmap(busy).filter(lambda chain: chain.parameters),
    st.integers(0, 10**9),
    st.sampled_from(["during", "after"]),
)
@examples(120)
def test_what_the_kernel_says_of_a_plan_the_machine_says_of_its_sequence(chain: Chain, seed: int, updates: str) -> None:
    rng = random.Random(seed)
    plan = random_plan(chain, rng)
    free = placer(chain, 2**50, VISITS, updates)
    assert free.judge(plan)[1] == 0
    peak = simulate(chain, to_sequence(chain, free, plan), None, updates).peak_bytes
    for limit in (2**50, peak, 3 * peak // 4, peak // 2):
        kernel = placer(chain, max(1, limit), VISITS, updates, host_limit=0)
        makespan, over, host_over = kernel.judge(plan)
        trace = simulate(chain, to_sequence(chain, kernel, plan), None, updates)
        assert trace.makespan == pytest.approx(makespan, rel=1e-12)
        assert trace.host_peak_bytes == host_over
        assert (trace.peak_bytes <= max(1, limit)) == (over == 0)


def test_updates_on_a_slow_host_that_nobody_waits_for() -> None:
    """They fall behind for steps, in a queue, where neither w nor o is on the host or comes back from it."""
    groups = tuple(ParameterGroup((i,), 0, 30, 0, 0.5, 40.0) for i in (1, 2))
    link = {"d2h_bidirectional_bandwidth": 3.0, "h2d_bidirectional_bandwidth": 2.0}
    chain = Chain((Stage("", 1.0, 2.0, 10, 20),) * 2, 5.0, 5.0, 10, parameters=groups, **link)
    genes = at_home(chain)
    genes[:, FLAGS] = ON_HOST
    plan, kernel = joined(empty(chain, VISITS), genes), placer(chain, 2**50, VISITS, "during")
    assert sum(op.kind is OpKind.H for op in to_sequence(chain, kernel, plan)) == 2
    assert kernel.judge(plan)[0] == pytest.approx(simulate(chain, to_sequence(chain, kernel, plan)).makespan, rel=1e-12)


def test_what_is_updated_at_once_stays_until_then_in_parts_too() -> None:
    parts = (ParameterGroup((1,), 30, 30, 60, 0.5),) * 2
    chain = Chain((Stage("", 1.0, 2.0, 10, 20),) * 2, 5.0, 5.0, 10, parameters=parts)
    genes = at_home(chain)
    genes[:, MASK], genes[:, FLAGS] = EVERYWHERE, STATE_LEAVES | GRADIENT_LEAVES
    sequence = to_sequence(chain, placer(chain, 2**50, VISITS, "during"), joined(empty(chain, VISITS), genes))
    assert not any(op.of == "g" for op in sequence)
    assert sum(op.kind is OpKind.PREFETCH and op.of == "w" for op in sequence) == 4  # for F 1 and for B 1


# -- the last search of a plan: the order of its operations


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
        kernels, order = _orders(problem, plan)
        kernels[0].anneal(
            order, 200, 1 + turn, 1e9, 1e9, np.zeros(4, np.int16), 0.0, order.copy(), np.zeros(1, np.int8)
        )
        plan = with_residents(chain, (tuple(plan)[n] for n in order[: len(plan)]))
        trace = simulate(chain, plan, problem.limit, updates)
        assert trace.makespan == kernels[0].judge(order)[0]
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
