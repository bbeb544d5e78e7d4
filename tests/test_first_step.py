"""The step that measures a model runs its forward once, and is the plain model's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import ALL, fresh, train
from torch import nn

import rotoff


def limit_of(model: nn.Module, batch: Any) -> int:
    """A little above the smallest."""
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(batch(), repeats=1)
    least = probe.min_mem_limit()
    limit = least + (probe.keep_all_memory - least) // 5
    probe.close()
    return limit


@pytest.mark.parametrize("kind", ALL)
def test_the_first_step_is_planned_and_on_its_course(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh(kind)
    limit = limit_of(model, batch)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model)).compute_sequence(limit, refine=False)
    ours, theirs = train(wrapped, batch), train(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "another course" not in caplog.text
    assert len(wrapped.plans()) == 1
    wrapped.close()


class Counted(nn.Module):
    """Its forward takes from an iterator, and leaves tensors of its graph in a list; neither is the module's."""

    def __init__(self, numbers: Iterator[int], left: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.world = lambda: (numbers, left)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, left = self.world()
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (1 + 0.01 * next(numbers))
            if n == 2:
                left.append(x.square().mean())
                x.register_hook(lambda gradient: gradient * 1.5)
        return x.sum()


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
def test_what_a_forward_takes_and_leaves_elsewhere_is_as_in_the_plain_model(mode: str) -> None:
    def trained(plan: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        left: list[torch.Tensor] = []
        model = Counted(itertools.count(), left)
        run: nn.Module = model
        if plan is not None:
            run = rotoff.Checkpointable(model).compute_sequence(plan, mode=mode)
        for n in range(3):
            torch.manual_seed(n)
            loss = run(torch.randn(64, 32))
            (loss + left.pop()).backward()
        assert not left
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    probe = rotoff.Checkpointable(Counted(itertools.count(), [])).measure(torch.randn(64, 32))
    limit = probe.min_mem_limit(mode) + 4096
    assert limit < probe.keep_all_memory
    assert all(torch.equal(a, b) for a, b in zip(trained(limit), trained(None), strict=True))


def test_a_limit_that_is_too_small_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.inner(x)

    whole = Whole()
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(rotoff.InfeasibleError):
        rotoff.Checkpointable(whole).compute_sequence(1)(torch.randn(16, 8, generator=torch.Generator()))
    assert whole.steps == 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.state_dict().items())
