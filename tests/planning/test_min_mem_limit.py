"""`Checkpointable.min_mem_limit` is the limit that `compute_sequence` accepts and one byte less is not; where keeping
everything fits, bytes are all that is measured, and times follow when somebody asks for them."""

from __future__ import annotations

import copy

import pytest
import torch
from models import ALL, dropping, fresh, residual
from planned_steps import Beside
from torch import nn

import rotoff
from rotoff.planning.request import Request

MODES = ("joint", "remat", "offload")


def refused(wrapped: rotoff.Checkpointable, limit: int, mode: str) -> int:
    """What the error says that would work."""
    with pytest.raises(rotoff.InfeasibleError) as caught:
        wrapped.compute_sequence(limit, mode=mode)
    return caught.value.min_mem_limit


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid(every=8)
def test_it_is_accepted_and_one_byte_less_is_not(name: str, check: bool) -> None:
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model, check=check).measure(batch())
    for mode in MODES:
        least = wrapped.min_mem_limit(mode)
        for limit in {1, least // 2 or 1, least - 1} - {0, least}:
            assert refused(wrapped, limit, mode) == least
        wrapped.compute_sequence(least, mode=mode)
        assert wrapped.get_expected_memory() <= least
        assert wrapped.min_mem_limit(mode) == least  # a plan changes nothing of it
    assert wrapped.min_mem_limit() == wrapped.min_mem_limit("joint")
    assert wrapped.min_mem_limit("joint") <= min(wrapped.min_mem_limit("remat"), wrapped.min_mem_limit("offload"))
    wrapped.close()


def test_it_is_of_what_was_measured_last() -> None:
    model, _ = dropping()
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(64, 32))
    large = wrapped.min_mem_limit("remat")
    assert wrapped.measure(torch.randn(16, 32)).min_mem_limit("remat") < large


def test_what_was_refused_is_refused_again_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = rotoff.Checkpointable(dropping()[0]).measure(torch.randn(64, 32))
    least = refused(wrapped, 1, "joint")
    monkeypatch.setattr(Request, "solve", None)
    assert refused(wrapped, least - 1, "joint") == least


def test_a_host_limit_that_binds_is_what_the_error_names() -> None:
    wrapped = rotoff.Checkpointable(dropping()[0]).measure(torch.randn(64, 32))
    least = wrapped.min_mem_limit("offload")
    with pytest.raises(
        rotoff.InfeasibleError, match="on the device and host_limit=5; without a host_limit the training step"
    ) as caught:
        wrapped.compute_sequence(least, mode="offload", host_limit=5)
    assert caught.value.min_mem_limit == least


def test_a_smaller_limit_is_planned_at_once() -> None:
    model, batch = residual()
    beside = Beside(model, 1 << 40)
    beside.step(batch())
    beside.at(beside.planned.keep_all_memory * 6 // 10)
    assert beside.planned.get_expected_makespan() > beside.planned.chain.compute_time
    beside.check(batch())
    least = beside.planned.min_mem_limit()
    assert refused(beside.planned, least - 1, "joint") == least


def test_times_are_those_of_the_step_under_autocast_and_in_training() -> None:
    """Also where the model is asked outside of autocast, and in eval mode without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        probe = rotoff.Checkpointable(copy.deepcopy(model)).measure(x)
        wrapped = rotoff.Checkpointable(model).compute_sequence("1 TiB")
        wrapped(x).sum().backward()
    expected = [stage.saved_bytes for stage in probe.chain.stages[:-1]]  # what follows the last differs
    wrapped.eval()
    drawn = torch.get_rng_state()
    with torch.no_grad():
        assert wrapped.get_expected_makespan() > 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not wrapped.training and not model[1].training
    assert [stage.saved_bytes for stage in wrapped.chain.stages[:-1]] == expected
