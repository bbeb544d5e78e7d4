"""How often stages are timed, and what is shown meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rotoff

pytestmark = pytest.mark.full_timing


@pytest.mark.parametrize("repeats", [0, -1, 2.5, True])
def test_invalid_repeats_are_refused(repeats: object) -> None:
    with pytest.raises(rotoff.OptionError, match="repeats is"):
        rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4))).measure(torch.randn(2, 4), repeats=repeats)


class Counted(torch.autograd.Function):
    """Counts the forwards that it is in."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def runs(model: nn.Module, repeats: int | None, x: torch.Tensor | None = None) -> int:
    Counted.runs = 0
    rotoff.Checkpointable(model, forms=False).measure(torch.randn(2, 4) if x is None else x, repeats=repeats)
    return Counted.runs


@pytest.mark.slow
def test_measuring_and_training_import_no_compiler() -> None:
    """Importing ``torch._dynamo`` takes seconds; a dispatch mode does so unless it says that it need not."""
    program = """
import sys, torch, rotoff
from torch import nn
block = lambda: nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = block()
    def forward(self, x):
        return x + self.inner(x)
model, x = nn.Sequential(*[Block() for _ in range(4)]), torch.randn(256, 64)
wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
assert any(stage.forms for stage in wrapped.chain.stages)
wrapped.compute_sequence(int(0.6 * wrapped.keep_all_memory), mode="remat", refine=False)
wrapped(x).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
