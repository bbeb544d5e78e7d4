"""Plans of the papers' systems are executed like any other: same losses, gradients and buffers, inside the limit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from models import fresh, plain, same, train  # noqa: E402

import rotoff  # noqa: E402
from rotoff.solver.policies import POLICIES  # noqa: E402

pytestmark = pytest.mark.full_search


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_trains_the_same_under_every_policy(policy: str) -> None:
    model, batch = fresh("mlp")
    wrapped = rotoff.Checkpointable(model, check=True).measure(batch())
    limit = wrapped.keep_all_memory * 9 // 10
    try:
        wrapped.compute_sequence(limit, policy=policy)
    except rotoff.InfeasibleError as error:
        assert f"with policy {policy}" in str(error) and error.min_mem_limit > limit
        limit = 2 * wrapped.keep_all_memory
        wrapped.compute_sequence(limit, policy=policy)
    assert wrapped.sequence.mode == policy
    assert wrapped.get_expected_memory() <= limit
    assert same(train(wrapped, batch), plain("mlp"))


def test_what_a_policy_does_not_know_is_refused_at_once() -> None:
    model, _ = fresh("mlp")
    wrapped = rotoff.Checkpointable(model)
    for options in ({"policy": "vdn"}, {"policy": "greedy", "mode": "remat"}, {"policy": "greedy", "refine": False}):
        with pytest.raises(rotoff.OptionError):
            wrapped.compute_sequence(1000, **options)
