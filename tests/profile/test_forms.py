"""Forms: a stage that keeps a part of what autograd saves gives the plain model's bits, within the bytes that are
charged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from models import ALL, Does, fresh, plain, same, train
from planned_steps import every_form, step_peak, with_sequence
from random_programs import random_sequence
from thoroughness import seeds
from torch import nn
from torch.nn import functional as F

import rotoff


def in_place(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes in place what a matrix product made, and what it had made of it before."""
    hidden = net.up(x)
    before = hidden.mean(dim=1, keepdim=True)  # reads it before the change
    hidden = F.relu(hidden, inplace=True)
    return x + net.down(hidden.mul(1.5).tanh_()) * before


def drawing(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Several draws, some of whose results are saved."""
    x = F.dropout(x, 0.2).tanh()
    x = x * torch.rand_like(x)
    return F.dropout(x.sigmoid(), 0.1) * torch.randn(x.shape[-1])


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Does(in_place, up=nn.Linear(32, 64), down=nn.Linear(64, 32)),
    "drawing": lambda: Does(drawing),
    "norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.SiLU()),
}


def around(middle: Callable[[], nn.Module]) -> tuple[nn.Sequential, Callable[[], Any]]:
    last = nn.Sequential(middle(), nn.Sigmoid()), nn.Linear(32, 4)
    return nn.Sequential(nn.Linear(16, 32), middle(), nn.Tanh(), *last), lambda: torch.randn(8, 16)


def under(dtype: torch.dtype | None, model: nn.Module) -> nn.Module:
    """`model`, whose forward runs under autocast."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return net.model(x)

    return model if dtype is None else Does(forward, model=model)


NAMED = ["mlp", "residual", "convolutional", "language", "tuples", "stateful", "side_inputs", "handed_on", "double"]
WITH_FORMS: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Any]]], torch.dtype | None]] = {
    **{name: (partial(fresh, name), None) for name in NAMED},
    **{name: (partial(around, middle), None) for name, middle in MIDDLES.items()},
    **{f"under {dtype}": (partial(fresh, "language"), dtype) for dtype in (torch.bfloat16, torch.float16)},
}


@pytest.mark.parametrize("name", WITH_FORMS)
@pytest.mark.grid(every=4)
def test_every_form_trains_bit_for_bit_within_its_bytes(name: str) -> None:
    make, dtype = WITH_FORMS[name]

    def made() -> tuple[nn.Module, Callable[[], Any]]:
        torch.manual_seed(0)
        return make()

    def trained(model: nn.Module) -> list[torch.Tensor]:
        return train(under(dtype, model), batch)

    model, batch = made()
    expected = trained(model)
    wrapped = rotoff.Checkpointable(made()[0])
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        wrapped.measure(batch())
    most = max(len(stage.forms) for stage in wrapped.chain.stages)
    assert most > 0
    for k in range(1, most + 1):
        wrapped.load_state_dict(made()[0].state_dict())
        wrapped.zero_grad()
        with_sequence(wrapped, every_form(wrapped.chain, k))
        assert same(trained(wrapped), expected), k
        assert dtype is not None or step_peak(wrapped, batch) <= wrapped.get_expected_memory(), k


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_random_sequences_with_forms_train_bit_for_bit(name: str) -> None:
    """With check=True, too, so that what is held is what is charged."""
    expected = plain(name, steps=2)
    for seed in seeds(8):
        model, batch = fresh(name)
        wrapped = rotoff.Checkpointable(model, check=seed % 2 == 0).measure(batch())
        sequence = random_sequence(wrapped.chain, seed, wildness=0.7, forms=True)
        assert same(train(with_sequence(wrapped, sequence), batch, steps=2), expected), str(sequence)
        wrapped.close()
