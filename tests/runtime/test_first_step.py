"""The step that measures a model runs its forward once, and is the plain model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import ALL, fresh, train
from step_by_step import works
from torch import nn

import rotoff


def limit_of(model: nn.Module, batch: Any) -> int:
    """A little above the smallest of a step of the loop."""
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).compute_sequence(1 << 40)
    train(probe, batch)
    least = probe.min_mem_limit()
    limit = least + (probe.keep_all_memory - least) // 5
    probe.close()
    return limit


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.grid
def test_the_first_step_is_planned_and_on_its_course(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh(kind)
    limit = limit_of(model, batch)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model)).compute_sequence(limit, refine=False)
    ours, theirs = train(wrapped, batch), train(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "another course" not in caplog.text
    assert len(wrapped.plans()) == 1
    wrapped.close()


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

    whole, x = Whole(), torch.randn(16, 8)
    run = rotoff.Checkpointable(whole).compute_sequence(1)
    run(x).sum().backward()  # the first step records itself
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(rotoff.InfeasibleError):
        run(x)
    assert whole.steps == 1
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.state_dict().items())


class Tied(nn.Module):
    """Uses one weight three times: twice as a table, and once in a linear layer, for which autocast casts it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = 3 * self.table(tokens)
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (0.7 * self.table(tokens.flip(0)) if n == 1 else 0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_gradients_of_a_weight_that_autocast_casts_are_added_up_in_the_plain_order() -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 50, (16, 32))

    def gradients(run: nn.Module) -> list[torch.Tensor | None]:
        run.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(tokens)
        loss.backward()
        return [p.grad for p in run.parameters()]

    plain = gradients(copy.deepcopy(model))
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None)
    with torch.autocast("cpu", torch.bfloat16):
        limit = (probe.measure(tokens).min_mem_limit() + probe.keep_all_memory) // 2
    run = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(limit)
    for _ in range(3):
        assert all(map(torch.equal, gradients(run), plain))
    assert works(run.sequence)
