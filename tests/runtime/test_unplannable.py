"""Steps whose course begins to recur and cannot be planned: their forward runs once, and they are the plain model's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import rotoff


class Doubled(torch.autograd.Function):
    """Uses a module that it is not given."""

    module: nn.Module

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x + Doubled.module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class Dense(nn.Module):
    """Raises, or uses a sparse tensor, if it is told to."""

    kind = ""
    runs: ClassVar[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(self.kind)
        if self.kind == "sparse within":
            x = torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x)
        elif self.kind == "raises":
            raise rotoff.MeasureError("the model's own")
        return x


class Kept:
    """What no recording can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Changing(nn.Module):
    """From the third step on it does what cannot be recorded. Each forward takes a number from an iterator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 64),
                nn.BatchNorm1d(64),
                nn.GELU(),
                nn.Sequential(nn.Dropout(0.1), Dense()),
                nn.Linear(64, 16),
            )
            for _ in range(5)
        )
        self.kind, self.step = kind, 0
        self.numbers: Iterator[int] = itertools.count(1)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.step += 1
        kind = self.kind if self.step > 2 else ""
        x, beside = x * next(self.numbers), None
        for n, block in enumerate(self.blocks):
            block[3][1].kind = kind if n == 2 else ""
            x = x + block(x)
            if n == 2 and kind == "sparse":
                x = torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x)
            elif n == 2 and kind == "function":
                Doubled.module = block
                x = Doubled.apply(x)
        if kind == "distribution":
            beside = torch.distributions.Normal(x.detach(), 1.0)
        elif kind == "graph":
            beside = Kept(x.tanh())
        elif kind == "nested":
            beside = torch.nested.nested_tensor([x.detach()])
        return x * 1.5, beside


def trained(model: nn.Module, own: Changing) -> list[Any]:
    own.step, own.numbers = 0, itertools.repeat(1) if own.kind == "function" else itertools.count(1)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(own.parameters(), 0.01)
    found = []
    for _ in range(7):
        output, beside = model(torch.randn(32, 16))
        loss = output.square().mean() + (beside.x.mean() if isinstance(beside, Kept) else 0)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in own.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(b.clone() for b in own.buffers()), torch.get_rng_state(), torch.tensor(own.step)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.grid
@pytest.mark.parametrize("mode", ["remat", "joint"])
@pytest.mark.parametrize("kind", ["distribution", "graph", "nested", "sparse", "sparse within", "function"])
def test_the_forward_runs_once(kind: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """But where a custom Function uses modules, which is said."""
    torch.manual_seed(0)
    plain = Changing(kind)
    expected = trained(plain, plain)
    torch.manual_seed(0)
    own = Changing(kind)
    model = rotoff.Checkpointable(own, cache_directory=None).measure(torch.zeros(32, 16), repeats=1)
    model.compute_sequence(model.min_mem_limit(mode), mode=mode)
    assert all(map(torch.equal, expected, trained(model, own)))
    assert caplog.text.count("a course that cannot be planned") == 1
    assert caplog.text.count("runs once more, since a custom Function uses modules") == (kind == "function")


def test_an_error_of_the_models_own_is_raised_at_once() -> None:
    """Also if it is a MeasureError, in a step that is recorded: no module runs again."""
    own = Changing("raises")
    own.step = 2
    model = rotoff.Checkpointable(own, cache_directory=None).compute_sequence("150 KiB")
    Dense.runs.clear()
    with pytest.raises(rotoff.MeasureError, match="the model's own"):
        model(torch.randn(32, 16))
    assert len(Dense.runs) == 3


class Sometimes(Changing):
    """Draws whether it does what cannot be recorded."""

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.step = 2 if random.random() < 0.4 else 0
        return super().forward(x)


def test_a_random_branch_that_cannot_be_planned(caplog: pytest.LogCaptureFixture) -> None:
    """The first step, which is measured, does not take it."""

    def run(model: nn.Module, own: Sometimes) -> list[Any]:
        random.seed(6)
        return trained(model, own)

    torch.manual_seed(0)
    plain = Sometimes("sparse")
    expected = run(plain, plain)
    torch.manual_seed(0)
    own = Sometimes("sparse")
    model = rotoff.Checkpointable(own, cache_directory=None).compute_sequence("150 KiB", mode="remat")
    assert all(map(torch.equal, expected, run(model, own)))
    assert caplog.text.count("a course that cannot be planned") == 1
