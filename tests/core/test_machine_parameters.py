"""The machine with parameters against the contract written down once more (`oracles.parameters`), legal or not, op by
op."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains, groups
from oracles.parameters import Illegal, judge
from random_programs import mutants, placed, random_sequence
from thoroughness import examples

from rotoff import Chain, InvalidSequenceError, Sequence, SequenceFormatError, keep_all, simulate

PARAMETERS = st.integers(0, 10**9)


def agree(chain: Chain, data: dict, limit: int | None = None, updates: str = "during") -> bool:
    """Whether the machine takes the sequence; it and the oracle say the same of it, to the bit."""
    after = updates == "after"
    try:
        expected = judge(chain.to_dict(), data, float("inf") if limit is None else limit, after)
    except Illegal as why:
        with pytest.raises((InvalidSequenceError, SequenceFormatError)) as caught:
            simulate(chain, Sequence.from_dict(data), limit, updates)
        index = getattr(caught.value, "index", None)
        if index is not None and not after:
            assert str(why).startswith(f"{index} "), (str(why), str(caught.value))
        return False
    trace = simulate(chain, Sequence.from_dict(data), limit, updates)
    assert trace.makespan == expected.makespan
    assert [event.memory for event in trace.events] == expected.memory
    assert [event.host_memory for event in trace.events] == expected.host_memory
    assert [(e.lane, e.start, e.end) for e in trace.events] == expected.rows
    assert [event.parameter_memory for event in trace.events] == expected.parameter_memory
    return True


@given(
    chains(most=5).flatmap(groups).filter(lambda chain: chain.parameters),
    PARAMETERS,
    st.sampled_from(["during", "after"]),
)
@examples(60)
def test_the_machine_is_the_one_of_the_contract(chain: Chain, seed: int, updates: str) -> None:
    rng = random.Random(seed)
    made = placed(chain, rng, updates)
    data = made.to_dict() | {"resident": made.resident}
    assert agree(chain, data, updates=updates), "what `place` makes is legal"
    peak = simulate(chain, made).peak_bytes
    assert agree(chain, data, peak or 1)
    assert peak < 2 or not agree(chain, data, peak - 1)
    others = mutants(data, len(chain.parameters), rng)
    mutant = next(others)
    for _ in range(40):
        if legal := agree(chain, mutant):
            agree(chain, mutant, updates="after")
        mutant = others.send(legal)


@given(chains(most=6), st.integers(0, 10**9))
@examples(40)
def test_without_parameters_nothing_has_changed(chain: Chain, seed: int) -> None:
    made = random_sequence(chain, seed, forms=True)
    assert "resident" not in made.to_dict()
    assert chain.to_dict()["version"] == 1
    assert "parameters" not in chain.to_dict()
    assert agree(chain, {**made.to_dict(), "resident": []})


@given(chains(most=5).flatmap(groups))
@examples(40)
def test_keeping_everything_is_legal_and_costs_the_updates_alone(chain: Chain) -> None:
    trace = simulate(chain, keep_all(chain))
    updates = sum(group.update_time for group in chain.parameters if group.grad_bytes)
    assert trace.makespan == pytest.approx(chain.compute_time + updates)
    assert trace.host_peak_bytes == trace.d2h_bytes == trace.h2d_bytes == 0
