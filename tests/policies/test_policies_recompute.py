"""The slides' recompute systems: rotor, Revolve, checkpoint_sequential and √L; POFO."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.chains import chains, text
from oracles.exhaustive import Search
from oracles.recurrences import Recurrences
from thoroughness import examples

from rotoff import Chain, OptionError, Stage, keep_all, simulate, solve
from rotoff.solver.plan_codes import without_forms
from rotoff.solver.policies.revolve import operations, swept
from rotoff.solver.remat import Table, solve_slots
from rotoff.solver.search import judged

pytestmark = pytest.mark.full_search


def homogeneous(L: int, u_F: float = 1.0, u_B: float = 2.0) -> Chain:
    return Chain(tuple(Stage("", u_F, u_B, 10, 20) for _ in range(L)), 1.0, 1.0, input_bytes=10)


# -- rotor


class Literal(Recurrences):
    """Equation (1) of the slides with its first sweep in the backward phase too: δ_L is carried from the start."""

    def rotor(self) -> float:
        self.forms = [form[:1] for form in self.forms]
        return self.opt(1, self.L, self.N)


@examples(150)
@given(chains(most=7), st.floats(0.2, 1.2), st.integers(1, 25))
def test_rotor_is_its_recurrence(chain, part, N):
    limit = int(simulate(chain, keep_all(chain)).peak_bytes * part)
    assume(limit > chain.input_bytes)
    cost, codes = solve_slots(without_forms(chain), limit, N, whole=Table.BACKWARD)
    literal = Literal(chain, limit, N, "up", bare=False).rotor()
    assert cost == pytest.approx(literal, abs=1e-9)
    if codes is not None:
        made = judged(chain, limit, codes, "rotor")
        assert made is not None
        assert simulate(chain, made.sequence, limit).makespan == pytest.approx(literal, abs=1e-9)


def test_rotor_golden():
    chain = homogeneous(4)
    assert simulate(chain, keep_all(chain)).peak_bytes == 110
    assert text(solve(chain, 110, policy="rotor")) == "F_all 1, F_all 2, F_all 3, F_all 4, B 4, B 3, B 2, B 1"
    # One byte less: some ā_i no longer fits, and one stage runs twice.
    assert text(solve(chain, 109, policy="rotor")) == "F_all 1, F_all 2, F_ck 3, F_all 4, B 4, F_all 3, B 3, B 2, B 1"


# -- Revolve


@cache
def program(length: int, slots: int) -> int:
    """Opt_0 of the slides in units of u_f, backwards left out."""
    if length == 0:
        return 0
    if slots == 1:
        return length * (length + 1) // 2
    return min(i + program(length - i, slots - 1) + program(i - 1, slots) for i in range(1, length + 1))


def test_revolve_closed_form_is_the_program():
    for length in range(60):
        for slots in range(1, 9):
            assert swept(length, slots) == program(length, slots)


@examples(60)
@given(st.integers(1, 25), st.integers(1, 8))
def test_revolve_runs_as_many_forwards_as_it_counts_and_holds_its_slots(L, slots):
    chain = homogeneous(L)
    trace = simulate(chain, operations(L, slots))
    assert trace.makespan == swept(L - 1, slots) * 1.0 + L * 3.0
    # Beside its slots it holds, at a backward, the output of the sweep to it, ā_i, δ_i and δ_{i−1}, and the caller's
    # a_L.
    assert trace.peak_bytes <= 10 * min(slots, L) + 10 + 20 + 10 + 10 + 10


# -- checkpoint_sequential and √L


def test_periodic_golden():
    # PyTorch cuts 5 stages in 2 as 2 + 3, and does not checkpoint the last segment.
    assert text(solve(homogeneous(5), 1000, segments=2, policy="periodic")) == (
        "F_ck 1, F_none 2, F_all 3, F_all 4, F_all 5, B 5, B 4, B 3, F_all 1, F_all 2, B 2, B 1"
    )


# -- persistent or not


def test_what_persistence_costs():
    """a_1 is large and cheap to make again, ā_2 small and dear: a_1 goes while ā_2 stays, which no persistent tree can
    say."""
    sizes = [(1, 4, 4), (4, 1, 1), (2, 1, 1), (1, 2, 4)]
    chain = Chain(tuple(Stage("", u, 1, size, saved, grad_bytes=0) for u, size, saved in sizes), 1.0, 1.0)
    best = solve(chain, 7, mode="remat")
    assert best.meta["makespan"] == Search(chain, 7, moves=False).optimum() == 13
    assert solve(chain, 7, slots=7, policy="rotor").meta["makespan"] == 17


# -- POFO, whose recurrences are those of tests/solver/test_dp.py


def test_pofo_golden():
    """Six equal stages at two thirds of the peak: a fast link moves the first saved sets, a slow one has them made
    again."""
    stages = tuple(Stage("", 1.0, 2.0, 10, 30, grad_bytes=10) for _ in range(6))

    def made(bandwidth: float) -> str:
        chain = Chain(stages, bandwidth, bandwidth, input_bytes=10)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        return text(solve(chain, peak * 2 // 3, policy="pofo"))

    assert made(100.0) == (
        "F_all 1, offload abar 1, F_all 2, offload abar 2, F_all 3, offload abar 3, F_all 4, free abar 1, F_all 5, "
        "free abar 2, F_all 6, free abar 3, B 6, prefetch abar 3, B 5, prefetch abar 2, wait abar 3, B 4, prefetch abar"
        " 1, wait abar 2, B 3, wait abar 1, B 2, B 1"
    )
    assert made(0.01) == (
        "F_ck 1, F_none 2, F_none 3, F_all 4, F_all 5, F_all 6, B 6, B 5, B 4, F_all 1, F_all 2, F_all 3, B 3, B 2, B 1"
    )


def test_slots_that_cannot_be():
    chain = Chain((Stage("", 1, 1, 1, 1),) * 2, 1, 1)
    with pytest.raises(OptionError, match="slots is 0"):
        solve(chain, 100, slots=0, policy="pofo")
    with pytest.raises(OptionError, match="slots is 0"):
        solve(chain, 100, slots=0, policy="dynprog")
    with pytest.raises(OptionError, match="8.00 GiB"):
        solve(chain, 100, slots=2000, policy="pofo")
