"""POFO as published: what its plans do on the machine. Its recurrences are those of `tests/solver/test_dp.py`."""

from __future__ import annotations

import pytest

from rotoff import Chain, OptionError, Stage, keep_all, simulate, solve

pytestmark = pytest.mark.full_search


def test_golden():
    """Six equal stages at two thirds of the peak: a fast link moves the first saved sets, a slow one has them made
    again."""
    stages = tuple(Stage("", 1.0, 2.0, 10, 30, grad_bytes=10) for _ in range(6))

    def made(bandwidth: float) -> str:
        chain = Chain(stages, bandwidth, bandwidth, input_bytes=10)
        peak = simulate(chain, keep_all(chain)).peak_bytes
        return ", ".join(map(str, solve(chain, peak * 2 // 3, policy="pofo")))

    assert made(100.0) == (
        "F_all 1, offload abar 1, F_all 2, offload abar 2, F_all 3, offload abar 3, F_all 4, free abar 1, F_all 5, "
        "free abar 2, F_all 6, free abar 3, B 6, prefetch abar 3, B 5, prefetch abar 2, wait abar 3, B 4, prefetch abar"
        " 1, wait abar 2, B 3, wait abar 1, B 2, B 1"
    )
    assert made(0.01) == (
        "F_ck 1, F_none 2, F_none 3, F_all 4, F_all 5, F_all 6, B 6, B 5, B 4, F_all 1, F_all 2, F_all 3, B 3, B 2, B 1"
    )


def test_options():
    chain = Chain((Stage("", 1, 1, 1, 1),) * 2, 1, 1)
    with pytest.raises(OptionError, match="slots is 0"):
        solve(chain, 100, slots=0, policy="pofo")
    with pytest.raises(OptionError, match="8.00 GiB"):
        solve(chain, 100, slots=2000, policy="pofo")
