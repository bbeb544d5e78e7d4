"""The kernels' tables against the recurrences in plain Python: equal costs at every state, for both roundings."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import chains
from oracles.recurrences import Recurrences

from rotoff import Chain, simulate
from rotoff._dp import Table
from rotoff.solver import joint, keep_all, remat
from rotoff.solver.plan_codes import evaluator
from rotoff.solver.slots import ROUNDINGS


def same(x: float, y: float) -> bool:
    return x == y or math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9)


def limit_at(chain: Chain, share: float) -> int:
    peak = simulate(chain, keep_all(chain)).peak_bytes
    return max(chain.input_bytes + 1, round(chain.input_bytes + share * (peak - chain.input_bytes)))


CASES = (st.integers(5, 60), st.sampled_from([0.3, 0.5, 0.7, 0.9, 1.1]), st.sampled_from(ROUNDINGS))


@given(chains(most=7), *CASES)
def test_remat_cost_is_the_recurrences(chain: Chain, N: int, share: float, rounding: str) -> None:
    limit = limit_at(chain, share)
    cost, codes = remat.solve_slots(chain, limit, N, rounding)
    assert same(cost, Recurrences(chain, limit, N, rounding).remat())
    if rounding == "up" and codes is not None:  # sound: it fits on exact bytes, and lasts as predicted
        makespan, over, _ = evaluator(chain, limit, codes.shape[1]).judge(codes.ravel())
        assert over == 0
        assert same(makespan, cost)


@given(chains(most=5), *CASES)
def test_joint_cost_is_the_recurrences(chain: Chain, N: int, share: float, rounding: str) -> None:
    limit = limit_at(chain, share)
    cost, _ = joint.solve_slots(chain, limit, N, rounding)
    assert same(cost, Recurrences(chain, limit, N, rounding).joint())


@given(chains(most=4), st.integers(5, 12), st.sampled_from([0.4, 0.7, 1.0]), st.sampled_from(ROUNDINGS))
def test_every_state_of_the_joint_tables(chain: Chain, N: int, share: float, rounding: str) -> None:
    limit = limit_at(chain, share)
    kernel, twin = joint.program(chain, limit, N, rounding), Recurrences(chain, limit, N, rounding)
    L = len(chain)
    for A in range(N + 1):
        for D in range(N + 1 - A):
            for i in range(1, L):
                for j in range(i, L):
                    assert same(kernel.backward(i, j, A, D)[0], twin.C(i, j, A, D))


@given(chains(most=6), st.integers(5, 40), st.sampled_from([0.4, 0.8]), st.sampled_from(ROUNDINGS))
def test_every_state_of_the_remat_table(chain: Chain, N: int, share: float, rounding: str) -> None:
    limit = limit_at(chain, share)
    kernel = remat.tables(chain, limit, N, rounding)
    twin = Recurrences(chain, limit, N, rounding)
    for m in range(N + 1):
        for i in range(1, len(chain) + 1):
            assert same(kernel.choice(Table.FORWARD, i, len(chain), m)[0], twin.opt_forward(i, m))
            for j in range(i, len(chain)):
                assert same(kernel.choice(Table.BACKWARD, i, j, m)[0], twin.opt(i, j, m))
