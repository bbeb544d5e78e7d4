"""The first replay of a training finds what measuring left on autograd's thread: cuDNN's choices of algorithms, workspaces."""

from __future__ import annotations

import os

import pytest
import torch
from device_bytes import step_peak
from torch import nn

import rotoff
from rotoff.runtime.plan import compile_sequence

pytestmark = pytest.mark.cuda
STANDIN = "STANDIN" in os.environ
WIDTH, BATCH, SIDE = (
    (7, 3, 14) if STANDIN else (72, 24, 60)
)  # shapes that no other test has, since the choices are the process's


def test_the_first_step_with_replays_keeps_to_its_bytes_where_cudnn_benchmarks() -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *blocks).cuda()
        x = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda")
        wrapped = rotoff.Checkpointable(model, stages=[*model], forms=False, cache_directory=None).measure(x)
        stages = range(1, len(wrapped.chain))
        text = [f"F_ck {i}" for i in stages] + [f"F_all {len(wrapped.chain)}", f"B {len(wrapped.chain)}"]
        # each is redone from its input, which stayed
        text += [part for i in reversed(stages) for part in (f"F_all {i}", f"B {i}")]
        wrapped.compute_sequence(1 << 45)
        plan = compile_sequence(wrapped.chain, rotoff.Sequence.from_text(text))
        wrapped._latest.plan = plan
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradient = torch.ones(BATCH, WIDTH, SIDE, SIDE, device="cuda")
        peak = step_peak(lambda: wrapped(x).backward(gradient))
        wrapped.close()
    assert peak.asked <= wrapped.get_expected_memory()
