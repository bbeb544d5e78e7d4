"""The kernel that decodes steps with parameters, against the machine: seconds, bytes and what is legal, for plans of
any kind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from thoroughness import examples

from rotoff import Chain, OpKind, ParameterGroup, Stage, simulate
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
from rotoff.solver.plan_codes import empty

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
    peak = simulate(chain, to_sequence(free, plan), None, updates).peak_bytes
    for limit in (2**50, peak, 3 * peak // 4, peak // 2):
        kernel = placer(chain, max(1, limit), VISITS, updates, host_limit=0)
        makespan, over, host_over = kernel.judge(plan)
        trace = simulate(chain, to_sequence(kernel, plan), None, updates)
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
    assert sum(op.kind is OpKind.H for op in to_sequence(kernel, plan)) == 2
    assert kernel.judge(plan)[0] == pytest.approx(simulate(chain, to_sequence(kernel, plan)).makespan, rel=1e-12)


def test_what_is_updated_at_once_stays_until_then_in_parts_too() -> None:
    parts = (ParameterGroup((1,), 30, 30, 60, 0.5),) * 2
    chain = Chain((Stage("", 1.0, 2.0, 10, 20),) * 2, 5.0, 5.0, 10, parameters=parts)
    genes = at_home(chain)
    genes[:, MASK], genes[:, FLAGS] = EVERYWHERE, STATE_LEAVES | GRADIENT_LEAVES
    sequence = to_sequence(placer(chain, 2**50, VISITS, "during"), joined(empty(chain, VISITS), genes))
    assert not any(op.of == "g" for op in sequence)
    assert sum(op.kind is OpKind.PREFETCH and op.of == "w" for op in sequence) == 4  # for F 1 and for B 1
