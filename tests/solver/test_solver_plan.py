"""The compiled decoder against the machine: the same step time and the same peaks, for any table of codes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.chains import busy, chains

from rotoff import Chain, min_mem_limit, simulate
from rotoff.solver import keep_all
from rotoff.solver.plan_codes import ALL, CK, DROP, MOVE, empty, evaluator, from_forwards, to_ops

pytestmark = pytest.mark.full_search


@given(chains().flatmap(busy), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_decoded_plans_are_what_the_machine_sees(chain: Chain, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16 * 4, size=(len(chain) + 1, 4)).astype(np.int16)
    codes[0] = rng.integers(0, 2)
    peak = simulate(chain, keep_all(chain)).peak_bytes
    least = min_mem_limit(chain, "joint")
    limit = max(1, round(least + share * max(0, peak - least)))
    decoder = evaluator(chain, limit, 4)
    makespan, most, host, over = decoder.evaluate(codes)
    rows = decoder.operations(codes)
    if rows is None or over:
        assert over > 0
        return
    trace = simulate(chain, to_ops(rows), limit)
    assert (trace.makespan, trace.peak_bytes, trace.host_peak_bytes) == (makespan, most, host)


def uniform(stages: int) -> Chain:
    from rotoff import Stage

    return Chain(tuple(Stage("", 1.0, 2.0, 10, 30, grad_bytes=0) for _ in range(stages)), 30.0, 30.0)


def text(chain: Chain, codes: np.ndarray, limit: int) -> str:
    rows = evaluator(chain, limit, codes.shape[1]).operations(codes)
    assert rows is not None
    return ", ".join(map(str, to_ops(rows)))


def test_a_segment_is_recomputed_from_its_checkpoint() -> None:
    codes = from_forwards(uniform(3), [(1, CK), (2, CK | DROP), (3, ALL), (1, CK), (2, ALL)])
    expected = "F_ck 1, F_none 2, F_all 3, B 3, F_ck 1, F_all 2, B 2, F_all 1, B 1"
    assert text(uniform(3), codes, 1000) == expected


def test_what_moves_leaves_late_and_returns_early() -> None:
    codes = empty(uniform(3))
    codes[1] = ALL | MOVE
    assert text(uniform(3), codes, 89) == (
        "F_all 1, offload abar 1, F_all 2, free abar 1, F_all 3, B 3, prefetch abar 1, wait abar 1, B 2, B 1"
    )
    assert text(uniform(3), codes, 90) == "F_all 1, F_all 2, F_all 3, B 3, B 2, B 1"  # it fits, so nothing moves
