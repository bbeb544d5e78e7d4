"""The bound of a step with parameters: below every sequence, and values by hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains, groups
from random_programs import mutants, placed
from thoroughness import examples

from rotoff import (
    Chain,
    InfeasibleError,
    InvalidSequenceError,
    Op,
    OpKind,
    OptionError,
    ParameterGroup,
    Sequence,
    SequenceFormatError,
    Stage,
    keep_all,
    lower_bound,
    min_mem_limit,
    simulate,
    solve,
)
from rotoff.core.sequence import drop, prefetch, w, wait

pytestmark = pytest.mark.full_timing

WITH_PARAMETERS = chains(most=4).flatmap(groups).filter(lambda chain: chain.parameters)


# -- sequences


@given(WITH_PARAMETERS.flatmap(busy), st.integers(0, 10**9), st.sampled_from(["during", "after"]))
@examples(40)
def test_no_sequence_beats_the_bound(chain: Chain, seed: int, updates: str) -> None:
    rng = random.Random(seed)
    made = placed(chain, rng, updates)
    trace = simulate(chain, made, updates=updates)
    limit = max(1, trace.peak_bytes)
    bound, best = lower_bound(chain, limit, updates=updates), trace.makespan
    others = mutants(made.to_dict() | {"resident": made.resident}, len(chain.parameters), rng)
    mutant = next(others)
    for _ in range(60):
        try:
            found = simulate(chain, Sequence.from_dict(mutant), limit, updates).makespan
        except (InvalidSequenceError, SequenceFormatError):
            found = math.inf
        best = min(best, found)
        mutant = others.send(found <= best)
    assert bound <= best * (1 + 1e-9)


def in_flight(stages: int, ahead: int, copy: float) -> tuple[Chain, Sequence]:
    """A chain of frozen groups, and a sequence in which their parameters come in `ahead` operations before their use,
    around the step's end."""
    frozen = tuple(ParameterGroup((i,), round(copy * 100)) for i in range(1, stages + 1))
    chain = Chain((Stage("", 1.0, 1.0),) * stages, 1.0, 100.0, parameters=frozen)
    uses = [*range(1, stages + 1), *range(stages, 0, -1)]
    arriving: set[int] = set()
    for _ in range(2):  # the second time from the state in which the first ends
        device, ops = set(uses[:ahead]), []
        for t, k in enumerate(uses):
            if k in arriving:
                ops.append(wait(w(k)))
                arriving.remove(k)
            ops.append(Op(OpKind.F_ALL if t < stages else OpKind.B, k))
            soon = [uses[(t + n) % len(uses)] for n in range(1, ahead + 1)]
            if k not in soon:
                ops.append(drop(w(k)))
                device.remove(k)
            if soon[-1] not in device:
                ops.append(prefetch(w(soon[-1])))
                device.add(soon[-1])
                arriving.add(soon[-1])
    return chain, Sequence(tuple(ops), resident=[f"w {k}" for k in sorted(device)])


def test_copies_that_fall_behind_for_four_steps_are_below_the_link_but_not_below_the_bound() -> None:
    chain, sequence = in_flight(20, 8, 1.28)
    trace = simulate(chain, sequence)
    link = trace.h2d_bytes / chain.h2d_bandwidth
    assert trace.makespan == pytest.approx(40.68)
    assert link == pytest.approx(40.96)
    assert lower_bound(chain, trace.peak_bytes) <= trace.makespan
    assert lower_bound(chain, trace.peak_bytes, steps=math.inf) <= link
    with pytest.raises(OptionError, match="steps is 3; give a number of at least 4"):
        lower_bound(chain, trace.peak_bytes, steps=3)


# -- by hand


def test_what_fits_costs_the_updates_that_the_host_cannot_do() -> None:
    stages = (Stage("", 1.0, 2.0, 10, 100),) * 2
    updated = ParameterGroup((1,), 50, 50, 100, update_time=0.5)
    chain = Chain(stages, 1000.0, 1000.0, 10, parameters=(updated, replace(updated, stages=(2,))))
    peak = simulate(chain, keep_all(chain)).peak_bytes
    for when in ("during", "after"):
        assert lower_bound(chain, 10 * peak, updates=when) == pytest.approx(7.0)
    assert lower_bound(chain, 10 * peak, mode="remat") == pytest.approx(7.0)
    on_host = replace(chain, parameters=tuple(replace(g, host_update_time=0.1) for g in chain.parameters))
    # After B 1, g 1 leaves (0.05 s), is used on the host (0.1 s), and w 1 comes back (0.05 s), before F 1.
    assert 6.04 <= lower_bound(on_host, 10 * peak) <= solve(on_host, 10 * peak).meta["makespan"] == pytest.approx(6.2)


def test_one_of_two_weights_at_a_time() -> None:
    # w 2 comes in between the end of F 1 and F 2, w 1 between that of B 2 and B 1; it stays from B 1 to F 1.
    frozen = (ParameterGroup((1,), 100), ParameterGroup((2,), 100))
    chain = Chain((Stage("", 1.0, 1.0),) * 2, 1.0, 100 / 3, parameters=frozen)
    assert lower_bound(chain, 100) == pytest.approx(1 + 3 + 1 + 1 + 3 + 1)
    assert lower_bound(chain, 200) == pytest.approx(4.0)
    assert min_mem_limit(chain, "joint") == 100


@pytest.mark.parametrize("out", [1e-3, 100.0])
def test_a_stage_is_made_again_once_its_weights_are_there(out: float) -> None:
    # At B 2 there is room for nothing else. Then w 1 comes in (3 s), and F 1 runs again (1 s), or abar 1 comes in (3 s).
    # w 2 comes in during F 1 and after it.
    frozen = (ParameterGroup((1,), 100), ParameterGroup((2,), 100))
    chain = Chain((Stage("", 1.0, 1.0, 0, 100),) * 2, out, 100 / 3, parameters=frozen)
    assert lower_bound(chain, 200, steps=math.inf) == pytest.approx(3 + 1 + 1 + 3 + 1 + 1)
    assert solve(chain, 200, refine=0.05).meta["makespan"] == pytest.approx(10.0)


def test_smallest_limits_by_hand() -> None:
    stages = (Stage("", 1.0, 1.0, 10, 30, grad_bytes=4), Stage("", 1.0, 1.0, 2, 20, grad_bytes=3))
    group = ParameterGroup((1, 2), 100, 50, 200, host_update_time=1.0)
    chain = Chain(stages, 1.0, 1.0, input_bytes=5, input_grad_bytes=1, parameters=(group,))
    # B 1: abar 1, a_0, a_2, δ_1, δ_0, w and g. B 2: abar 2, a 1, a_0, δ_2, δ_1, w and g.
    assert min_mem_limit(chain, "joint") == max(30 + 5 + 2 + 4 + 1, 20 + 10 + 5 + 3 + 4) + 150
    on_device = replace(chain, parameters=(replace(group, host_update_time=None, update_transient_bytes=7),))
    assert min_mem_limit(on_device, "joint") == 5 + 2 + 1 + 100 + 50 + 200 + 7
    assert min_mem_limit(on_device, "remat") >= min_mem_limit(chain.without_parameters(), "remat") + 300
    with pytest.raises(InfeasibleError, match=r"365 bytes\) in mode joint; the limit is 364 B") as caught:
        lower_bound(on_device, 364)
    assert caught.value.min_mem_limit == 365
    assert 0 < lower_bound(on_device, 365) < math.inf


@given(chains(most=6))
@examples(15)
def test_without_parameters_nothing_has_changed(chain: Chain) -> None:
    limit = max(1, min_mem_limit(chain, "offload"), min_mem_limit(chain, "remat"))
    asked = itertools.product(("joint", "remat", "offload"), ("during", "after"))
    assert {lower_bound(chain, limit, *one) for one in asked} == {lower_bound(chain, limit)}
