"""Batches of varying sizes under a `device_limit`: the plan of a larger size serves smaller ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from allocated import own_again, peak_bytes
from torch import nn

import rotoff
from rotoff.planning import tape_placed_planner as planner

LENGTHS = (64, 31, 48, 9, 64, 23, 57, 40)


def language() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(5)]
    return nn.Sequential(nn.Embedding(40, 32), *blocks, nn.Linear(32, 40))


def batches(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (16, length), generator=generator) for length in lengths]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture
def searches() -> Iterator[mock.Mock]:
    with mock.patch.object(planner, "solve", wraps=planner.solve) as solve:
        yield solve


def limited(model: nn.Module, updates: str, **options: Any) -> tuple[rotoff.Checkpointable, torch.optim.Optimizer, int]:
    """The model with half of the memory that it needs at its largest size."""
    wrapped, optimizer = rotoff.Checkpointable(model, cache_directory=None), adamw(model)
    torch.manual_seed(3)
    wrapped.measure(batches()[0], repeats=1).compute_sequence(device_limit="1 TiB", optimizer=optimizer)
    limit = wrapped.keep_all_memory // 2
    wrapped.compute_sequence(device_limit=limit, optimizer=optimizer, updates=updates, refine=False, **options)
    return wrapped, optimizer, limit


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.grid
def test_smaller_batches_need_no_search(updates: str, searches: mock.Mock) -> None:
    model = language()
    plain = copy.deepcopy(model)
    wrapped, optimizer, limit = limited(model, updates)
    searched, twin = searches.call_count, adamw(plain)
    for n, tokens in enumerate(batches()):
        torch.manual_seed(n)
        told = step(wrapped, optimizer, tokens)
        torch.manual_seed(n)
        assert told == step(plain, twin, tokens)
    assert searches.call_count == searched
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    rows = {row.shapes[0][1]: row for row in wrapped.plans()}
    assert set(rows) == set(LENGTHS)
    assert sum(row.measured for row in rows.values()) <= 3
    assert all(row.memory <= limit for row in rows.values())


def test_a_smaller_batch_keeps_its_predicted_peak() -> None:
    model = language()
    wrapped, optimizer, _ = limited(model, "after")
    tokens = batches((64, 31, 40))
    for one in tokens:
        step(wrapped, optimizer, one)
    for one in tokens[1:]:  # what lies on the device between steps counts, too
        measured = peak_bytes(
            lambda one=one: step(wrapped, optimizer, one), before=lambda: own_again(model, [optimizer])
        )
        assert 0.7 * wrapped.get_expected_memory() <= measured + one.nbytes <= wrapped.get_expected_memory()


def test_a_larger_batch_is_planned_anew(searches: mock.Mock) -> None:
    wrapped, optimizer, limit = limited(language(), "after")
    (larger,) = batches((72,))
    searched = searches.call_count
    step(wrapped, optimizer, larger)
    assert searches.call_count > searched
    assert wrapped.get_expected_memory() <= limit


def test_the_largest_batch_is_planned_before_training(searches: mock.Mock) -> None:
    largest, *smaller = batches()
    model = language()
    wrapped, optimizer = rotoff.Checkpointable(model, cache_directory=None).measure(smaller[0]), adamw(model)
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizer, up_to=largest)
    limit = wrapped.keep_all_memory // 2
    wrapped.compute_sequence(device_limit=limit, optimizer=optimizer, up_to=largest, refine=False)
    searched = searches.call_count
    for tokens in (*smaller, largest):
        step(wrapped, optimizer, tokens)
    assert searches.call_count == searched
    with pytest.raises(rotoff.InfeasibleError, match="the device_limit is 1.00 KiB"):
        wrapped.compute_sequence(device_limit="1 KiB", optimizer=optimizer, up_to=largest)
