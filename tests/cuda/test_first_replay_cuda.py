"""The first replay of a training finds what measuring left on autograd's thread: cuDNN's choices of algorithms,
workspaces. And no replay makes the host wait, but where cuDNN draws dropout of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from device_bytes import step_peak
from torch import nn

import rotoff
from rotoff.runtime.execution_plan import ExecutionPlan, compile_sequence

pytestmark = pytest.mark.cuda
STANDIN = "STANDIN" in os.environ
# shapes that no other test has, since the choices are the process's
WIDTH, BATCH, SIDE = (7, 3, 14) if STANDIN else (72, 24, 60)


def all_redone(chain: rotoff.Chain) -> ExecutionPlan:
    """A plan that redoes each stage but the last from its input, which stays."""
    stages = range(1, len(chain))
    text = [f"F_ck {i}" for i in stages] + [f"F_all {len(chain)}", f"B {len(chain)}"]
    text += [part for i in reversed(stages) for part in (f"F_all {i}", f"B {i}")]
    return compile_sequence(chain, rotoff.Sequence.from_text(text))


def test_the_first_step_with_replays_keeps_to_its_bytes_where_cudnn_benchmarks() -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *blocks).cuda()
        x = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda")
        wrapped = rotoff.Checkpointable(model, stages=[*model], forms=False, cache_directory=None).measure(x)
        wrapped.compute_sequence(1 << 45)
        wrapped._latest.plan = all_redone(wrapped.chain)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradient = torch.ones(BATCH, WIDTH, SIDE, SIDE, device="cuda")
        peak = step_peak(lambda: wrapped(x).backward(gradient))
        wrapped.close()
    assert peak.asked <= wrapped.get_expected_memory()


class Recurrent(nn.Module):
    """Two layers of cuDNN's with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(64, 64, num_layers=2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_replay_makes_the_host_wait_for_cudnns_own_dropout_alone(recurrent: bool, record_property: Any) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()) for _ in range(10)]
    model = nn.Sequential(*blocks, *([Recurrent()] if recurrent else []), nn.Linear(64, 64)).cuda()
    x = torch.randn(16, 8, 64, device="cuda")
    wrapped = rotoff.Checkpointable(model, forms=False, cache_directory=None).measure(x)
    wrapped.compute_sequence(1 << 45)
    wrapped._latest.plan = all_redone(wrapped.chain)
    gradient = torch.ones(16, 8, 64, device="cuda")
    wrapped(x).backward(gradient)
    torch.cuda.set_sync_debug_mode("error")
    waited = ""
    try:
        wrapped(x).backward(gradient)
    except RuntimeError as error:
        waited = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record_property("the host waits", waited or "nowhere")
    assert bool(waited) == recurrent
    wrapped.close()
