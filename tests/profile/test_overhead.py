"""What the runtime itself takes of the compute lane: charged by stage and by tensor, in the chain of a planned step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotoff

pytestmark = pytest.mark.full_timing


def test_simulated_makespan_equals_expected_makespan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(2048, 16))
    for share in (1.0, 0.7, 0.5):
        wrapped.compute_sequence(int(share * wrapped.keep_all_memory))
        assert rotoff.simulate(wrapped.chain, wrapped.sequence).makespan == wrapped.get_expected_makespan()
    wrapped.close()
