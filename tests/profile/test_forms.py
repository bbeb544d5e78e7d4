"""Forms: a stage that keeps a part of what autograd saves gives the plain model's bits, within the bytes that are
charged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from models import ALL, Does, fresh, many
from planned_steps import Beside, bits_and_bytes, every_form
from random_programs import random_sequence
from thoroughness import seeds
from torch import nn
from torch.nn import functional as F

MODES = "remat", "offload", "joint"


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


NAMED = ["mlp", "residual", "convolutional", "language", "tuples", "stateful", "side_inputs", "handed_on", "double"]
WITH_FORMS: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Any]]], Callable[[], Any]]] = {
    **{name: (partial(fresh, name), nullcontext) for name in NAMED},
    **{name: (partial(around, middle), nullcontext) for name, middle in MIDDLES.items()},
    **{
        f"under {dtype}": (partial(fresh, "language"), partial(torch.autocast, "cpu", dtype))
        for dtype in (torch.bfloat16, torch.float16)
    },
}


@pytest.mark.parametrize("name", WITH_FORMS)
@pytest.mark.grid(every=4)
def test_every_form_trains_bit_for_bit_within_its_bytes(name: str) -> None:
    torch.manual_seed(0)
    make, around = WITH_FORMS[name]
    model, batch = make()
    beside = Beside(model, sample=(batch(),), around=around)
    chain = beside.planned.chain
    most = max(len(stage.forms) for stage in chain.stages)
    assert most > 0
    for k in range(1, most + 1):
        beside.following(every_form(chain, k))
        beside.step(batch())
        beside.check(batch())


# programs in which a value brings what another has, or is making
FOUND = {"handed_on": [36, 56], "tuples": [71, 90], "stateful": [13]}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_random_sequences_train_bit_for_bit_within_predicted_bytes(name: str, cast: bool) -> None:
    """Autocast keeps a cast of every weight from its first use on: as much as large weights take beside a small batch.
    With check=True, too, so that what is held is what is charged."""
    model, draw = fresh(name) if cast else many(name)
    around = partial(torch.autocast, "cpu", torch.bfloat16) if cast else nullcontext
    beside = bits_and_bytes(model, lambda: (draw(),), MODES if cast else (), around=around, check=not cast)
    for seed in [*seeds(8), *FOUND.get(name, [])]:
        sequence = random_sequence(beside.planned.chain, seed, wildness=0.75, forms=seed % 2 == 0)
        beside.following(sequence)
        beside.check(draw())
