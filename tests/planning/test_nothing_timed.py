"""Where keeping everything fits, bytes are all that is measured; times follow when somebody asks for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import residual, same, train
from torch import nn

import rotoff

ROOM = "1 TiB"


def in_room(model: nn.Module, **options: Any) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, cache_directory=None, **options).compute_sequence(ROOM)


def test_a_smaller_limit_is_planned_at_once() -> None:
    model, batch = residual()
    plain = copy.deepcopy(model)
    wrapped = in_room(model)
    ours, theirs = train(wrapped, batch, steps=1), train(plain, batch, steps=1)
    assert same(ours, theirs)
    limit = wrapped.keep_all_memory * 6 // 10
    wrapped.compute_sequence(limit, refine=False)
    assert wrapped.get_expected_makespan() > wrapped.chain.compute_time
    assert same(train(wrapped, batch), train(plain, batch))
    x = batch()
    assert peak_bytes(lambda: wrapped(x).sum().backward()) <= wrapped.get_expected_memory() <= limit
    least = wrapped.min_mem_limit()
    with pytest.raises(rotoff.InfeasibleError) as error:
        wrapped.compute_sequence(least - 1)
    assert error.value.min_mem_limit == least


def test_times_are_those_of_the_step_under_autocast_and_in_training() -> None:
    """Also where the model is asked outside of autocast, and in eval mode without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(x)
        wrapped = in_room(model)
        wrapped(x).sum().backward()
    expected = [stage.saved_bytes for stage in probe.chain.stages[:-1]]  # what follows the last differs
    wrapped.eval()
    drawn = torch.get_rng_state()
    with torch.no_grad():
        assert wrapped.get_expected_makespan() > 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not wrapped.training and not model[1].training
    assert [stage.saved_bytes for stage in wrapped.chain.stages[:-1]] == expected
