"""The value of a linear program: the solver's where its prices are right, and never above it where they are wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from rotoff.solver.linear_program import Program

HONEST = scipy.optimize.linprog


def program_of(seed: int) -> Program:
    """Random rows that one random solution is within."""
    rng = np.random.default_rng(seed)
    made = Program()
    lengths = [made.length() for _ in range(rng.integers(1, 5))]
    others = made.variables(int(rng.integers(1, 12)), 2.0)
    solution = np.concatenate([rng.random(len(lengths)) * 10, rng.random(len(others)) * 2])
    for _ in range(rng.integers(1, 15)):
        factors = rng.normal(size=len(solution)) * (rng.random(len(solution)) < 0.5) * 10.0 ** rng.integers(-4, 4)
        equal = bool(rng.integers(2))
        right = float(factors @ solution) - (0.0 if equal else float(rng.random()))
        made.row([(x, float(a)) for x, a in enumerate(factors) if a], right, equal)
    made.row([(x, 1.0) for x in lengths], 0.1)
    return made


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-9, 0.1, 3.0]))
def test_prices_that_are_wrong_give_less(seed: int, wrong: float) -> None:
    program, rng, found = program_of(seed), np.random.default_rng(seed), {}

    def solver(*args: Any, **options: Any) -> Any:
        found["least"] = HONEST(*args, **options).fun
        within = [(0, None if most == np.inf else most) for most in program.most]
        found["within"] = HONEST(*args, **options, bounds=within).fun
        prices = HONEST(*args, **options)
        for rows in (prices.ineqlin, prices.eqlin):
            rows.marginals = rows.marginals * (1 + wrong * rng.normal(size=rows.marginals.shape))
        return prices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scipy.optimize, "linprog", solver)
        value = program.value()
    assert value <= found["within"] + 1e-7 * max(1, abs(found["within"]))  # rows of HiGHS's own solution hold to 1e-7
    if not wrong:
        assert value == pytest.approx(found["least"], rel=1e-6, abs=1e-6)


def test_no_prices_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(ineqlin=SimpleNamespace(marginals=None), eqlin=SimpleNamespace(marginals=None))
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *args, **options: nothing)
    assert program_of(1).value() == -np.inf
