"""Forms on CUDA: bits of the plain model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.core.sequence import Op, OpKind
from rotoff.planning.step_planner import compiled

pytestmark = pytest.mark.cuda

SIZE = 64 if "STANDIN" in os.environ else 512  # the stand-in of tests/cuda_standin computes on the CPU


class Block(nn.Module):
    """A decoder block: attention and feed-forward, both with dropout."""

    def __init__(self, width: int, heads: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout.p)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, w)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def model_and_batch(dropout: float) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, SIZE), *[Block(SIZE, dropout=dropout) for _ in range(4)], nn.Linear(SIZE, 64)
    ).cuda()
    return model, torch.randn(8, SIZE, 64, device="cuda")


def gradients(model: nn.Module, x: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_form_gives_the_bits_of_the_plain_model(dropout: float, autocast: bool) -> None:
    model, x = model_and_batch(dropout)
    with deterministic():
        gradients(model, x, autocast)
        expected = gradients(model, x, autocast)
        again = gradients(model, x, autocast)
        assert differing(model, again, expected) == [], "the plain model itself gives other bits each time"
        wrapped = rotoff.Checkpointable(model)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            wrapped.measure(x)
        chain = wrapped.chain
        most = max(len(stage.forms) for stage in chain.stages)
        assert most > 0
        for k in range(1, most + 1):
            forwards = []
            for i, stage in enumerate(chain.stages, start=1):
                form = min(k, len(stage.forms))
                forwards.append(Op(OpKind.F_SEL, i, form) if form else Op(OpKind.F_ALL, i))
            ops = (*forwards, *(Op(OpKind.B, i) for i in range(len(chain), 0, -1)))
            wrapped.compute_sequence(1 << 45)
            plan = wrapped._latest.plan
            wrapped._latest.plan = compiled(plan.profile, plan.found, rotoff.Sequence(ops))
            got = gradients(wrapped, x, autocast)
            assert differing(model, got, expected) == [], k


def differing(model: nn.Module, got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[str]:
    """Which of loss and gradients have other bits, and by how much."""
    names = ["loss", *(name for name, _ in model.named_parameters())]
    rows = zip(names, got, expected, strict=True)
    return [f"{name}: {float((a - b).abs().max()):.3g}" for name, a, b in rows if not torch.equal(a, b)]


@contextmanager
def deterministic() -> Iterator[None]:
    """Attention's backward adds up in any order otherwise, and also where one only asks to be warned."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
