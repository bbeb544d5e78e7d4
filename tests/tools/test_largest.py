"""The inverse question: the largest size that trains, and what binds beyond it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from typing import Any

import pytest
import torch
from models import Does, Residual, linears
from torch import nn

import rotoff
from rotoff.tools.largest import searched

WIDTH = 64
SMALL = rotoff.Device("small", 2**24, 1e10, {"float32": 1e10}, 1e9, 1e9)


def blocks(depth: int = 2) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[Residual(WIDTH) for _ in range(depth)])


def rows(n: int) -> tuple[nn.Module, torch.Tensor]:
    return blocks(), torch.empty(n, WIDTH, device="meta")


def deep(n: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return blocks(n), (torch.empty(64, WIDTH, device="meta"),)


@pytest.mark.parametrize(
    ("build", "step", "memory"),
    [(rows, 1000, 2**24), pytest.param(deep, 4, 599_024, marks=pytest.mark.slow)],
)
def test_the_largest_fits_and_the_next_is_proven_not_to(build: Any, step: int, memory: int) -> None:
    """Of many layers, the optimizer's counters alone stay on the device, some bytes each."""
    device = dataclasses.replace(SMALL, memory_bytes=memory)
    found = rotoff.largest(build, device=device, step=step)
    assert found.size > 0 and found.size % step == 0 and found.refused == found.size + step
    assert found.planned is not None and found.planned.fits
    assert f"{found.size} works; {found.refused} cannot work: " in str(found)
    assert len(found.tried) <= 8  # halving what is open asks twice as often
    model, sample = build(found.refused)
    sample = sample if isinstance(sample, tuple) else (sample,)
    assert not rotoff.plan(model, *sample, device=device, modes="joint").fits
    assert "alone needs" in found.binds


def test_parameters_move_unless_a_mem_limit_is_given_and_what_binds_is_named() -> None:
    tiny = rotoff.Device("tiny", 2**22, 1e10, {"float32": 1e10}, 1e9, 1e9)
    whole = rotoff.largest(deep, device=tiny, most=12)
    assert (whole.size, whole.refused) == (12, None)
    assert str(whole) == "12 works, and nothing larger was asked for" and all(whole.tried.values())
    assert whole.planned is not None and whole.planned.best.name.startswith("rotoff, device_limit")
    stay = rotoff.largest(deep, device=tiny, mem_limit="2 MiB", most=12)
    assert 0 < stay.size < 12 and stay.binds.startswith("DOES NOT FIT: with even the smallest limit it takes ")
    given = rotoff.largest(deep, device=tiny, mem_limit="100 KiB")
    assert (given.size, given.refused) == (0, 1) and given.binds.startswith("DOES NOT FIT in 100.00 KiB; mem_limit may")


@pytest.mark.parametrize("last", [1, 2, 3, 1000])
@pytest.mark.parametrize("power", [0, 0.5, 1, 2, 3])
def test_the_search_ends_beside_the_largest_for_any_shape_of_what_is_left(power: float, last: int) -> None:
    for largest in (0, 1, 2, 5, 37, 999, 5000):
        asked: list[int] = []

        def ask(n: int, asked: list[int] = asked, largest: int = largest) -> Any:
            asked.append(n)
            left = (largest + 0.5) ** power - n**power if power else 0.5 - (n > largest)
            return left

        tried = searched(ask, last)
        assert len(asked) == len(set(asked)) <= 3 * math.log2(last + 1) + 3
        low = max((n for n in tried if tried[n] >= 0), default=0)
        assert low == min(largest, last)
        assert low == last or low + 1 in tried


def test_a_size_that_the_model_does_not_take_is_named_and_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(256, 16, device="meta")
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    with pytest.raises(rotoff.MeasureError, match=r"^size \d+: .* give the largest that it takes as most=$"):
        rotoff.largest(lambda n: (linear, torch.empty(n, 256 if n < 99 else 255, device="meta")), device="T4")
    with pytest.raises(rotoff.MeasureError, match="^size 1: .*reduction dim"):
        rotoff.largest(lambda n: (linear, torch.empty(n, 255, device="meta")), device="T4")
    assert not logged


def asks(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Asks for a value that its inputs do not decide, as the mask of a language model does."""
    for layer in net.layers:
        x = layer(x) if torch.arange(4).diff().eq(1).all() else -x
    return x


def test_a_question_that_the_batch_does_not_decide_can_be_estimated_and_is_not_asked_again() -> None:
    names, net = [f"layers.{n}" for n in range(3)], Does(asks, layers=linears(3, 16))
    plain = copy.deepcopy(net)
    chain = rotoff.estimate(rotoff.Checkpointable(net, stages=names), torch.randn(256, 16), device="CPU")
    model = rotoff.Checkpointable(net, stages=names).measure(torch.randn(256, 16), repeats=1)
    found, measured = ([(s.name, s.output_bytes, s.saved_bytes) for s in one.stages] for one in (chain, model.chain))
    assert found == measured and len(found) == 3
    model.compute_sequence(model.min_mem_limit("remat"), mode="remat", refine=False)
    x = torch.randn(256, 16)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
