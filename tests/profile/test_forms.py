"""Forms: a stage that keeps a part of what autograd saves gives the plain model's bits, within the bytes that are
charged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from models import ALL, Attention, Residual, fresh, plain, same, train
from planned_steps import every_form, step_peak, with_sequence
from random_programs import random_sequence
from recording_link import Forgetful, RecordingLink, moves_over
from thoroughness import seeds
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.core.sequence import Op, OpKind


class InPlace(nn.Module):
    """Changes in place what a matrix product made, and what it had made of it before."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        before = hidden.mean(dim=1, keepdim=True)  # reads it before the change
        hidden = F.relu(hidden, inplace=True)
        return x + self.down(hidden.mul(1.5).tanh_()) * before


class Drawing(nn.Module):
    """Several draws, some of whose results are saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.2).tanh()
        x = x * torch.rand_like(x)
        return F.dropout(x.sigmoid(), 0.1) * torch.randn(x.shape[-1])


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.linear(x)))


def around(middle: type[nn.Module]) -> tuple[nn.Sequential, Callable[[], Any]]:
    last = nn.Sequential(middle(), nn.Sigmoid()), nn.Linear(32, 4)
    return nn.Sequential(nn.Linear(16, 32), middle(), nn.Tanh(), *last), lambda: torch.randn(8, 16)


def words() -> tuple[nn.Sequential, Callable[[], Any]]:
    blocks = [nn.Sequential(Attention(32, 4), Residual(32)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50))
    return model, lambda: torch.randint(0, 50, (4, 12))


class Under(nn.Module):
    """A model whose forward runs under autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            result: torch.Tensor = self.model(x)
        return result


NAMED = ["mlp", "residual", "convolutional", "language", "tuples", "stateful", "side_inputs", "handed_on", "double"]
WITH_FORMS: dict[str, tuple[Callable[[], tuple[nn.Module, Callable[[], Any]]], torch.dtype | None]] = {
    **{name: (partial(fresh, name), None) for name in NAMED},
    **{middle.__name__: (partial(around, middle), None) for middle in (InPlace, Drawing, Norm)},
    **{f"under {dtype}": (words, dtype) for dtype in (torch.bfloat16, torch.float16)},
}


@pytest.mark.parametrize("name", WITH_FORMS)
@pytest.mark.grid(every=4)
def test_every_form_trains_bit_for_bit_within_its_bytes(name: str) -> None:
    make, dtype = WITH_FORMS[name]

    def made() -> tuple[nn.Module, Callable[[], Any]]:
        torch.manual_seed(0)
        return make()

    def trained(model: nn.Module) -> list[torch.Tensor]:
        return train(model if dtype is None else Under(model, dtype), batch)

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


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("name", ["residual", "language"])
def test_moved_forms_have_no_race(name: str, eagerness: float) -> None:
    """What a form stores travels; what it does not is redone after it has arrived."""
    expected = plain(name, steps=2)
    model, batch = fresh(name)
    wrapped = rotoff.Checkpointable(model).measure(batch())
    for seed in seeds(4):
        link = RecordingLink(eagerness, seed)
        got, sequence = over(link, wrapped, name, seed)
        assert link.check() == [], str(sequence)
        assert same(got, expected), str(sequence)
        link.close()


def test_order_checker_notices_missing_wait_for_form() -> None:
    expected, noticed = plain("residual", steps=2), 0
    counting = Forgetful()
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    over(counting, wrapped, "residual", 0)
    for n in range(1, counting.waits + 1):
        link = Forgetful(n)
        got, _ = over(link, wrapped, "residual", 0)
        if link.check():
            noticed += 1
        else:
            assert same(got, expected)
    assert noticed > 0


def over(
    link: RecordingLink, wrapped: rotoff.Checkpointable, name: str, seed: int
) -> tuple[list[torch.Tensor], rotoff.Sequence]:
    """Train the model `name`, from its beginning, with every stage in some form, moved out and back, over `link`."""
    model, batch = fresh(name)
    wrapped.load_state_dict(model.state_dict())
    wrapped.zero_grad()
    ops: list[Op] = []
    chain, L = wrapped.chain, len(wrapped.chain)
    for i, stage in enumerate(chain.stages, start=1):
        form = (seed + i) % (1 + len(stage.forms))
        ops.append(Op(OpKind.F_SEL if form else OpKind.F_ALL, i, form))
        if i < L:
            ops.append(Op(OpKind.OFFLOAD, i, saved=True))
        if i > 1:
            ops.append(Op(OpKind.FREE, i - 1, saved=True))
    ops.append(Op(OpKind.PREFETCH, L - 1, saved=True))
    ops.append(Op(OpKind.WAIT, L - 1, saved=True))
    for i in range(L, 0, -1):
        if i - 2 >= 1:
            ops.append(Op(OpKind.PREFETCH, i - 2, saved=True))
        ops.append(Op(OpKind.B, i))
        if i - 2 >= 1:
            ops.append(Op(OpKind.WAIT, i - 2, saved=True))
    sequence = rotoff.Sequence(tuple(ops), mode="moved")
    with_sequence(wrapped, sequence)
    moves_over(wrapped, link)
    return train(wrapped, batch, steps=2), sequence
