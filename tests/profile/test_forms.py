"""Forms: a stage that keeps a part of what autograd saves gives the plain model's bits, within the bytes that are
charged."""

from __future__ import annotations

from collections.abc import Callable
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

WITH_FORMS = [
    "mlp",
    "residual",
    "convolutional",
    "language",
    "tuples",
    "stateful",
    "side_inputs",
    "handed_on",
    "double",
]


def measured(name: str, **options: Any) -> tuple[rotoff.Checkpointable, Callable[[], Any]]:
    model, batch = fresh(name)
    return rotoff.Checkpointable(model, **options).measure(batch()), batch


# -- running


@pytest.mark.parametrize("name", WITH_FORMS)
@pytest.mark.grid(every=6)
def test_every_form_trains_bit_for_bit_within_its_bytes(name: str) -> None:
    wrapped, batch = measured(name)
    most = max(len(stage.forms) for stage in wrapped.chain.stages)
    assert most > 0
    for k in range(1, most + 1):
        again, batch = fresh(name)
        wrapped.load_state_dict(again.state_dict())
        wrapped.zero_grad()
        with_sequence(wrapped, every_form(wrapped.chain, k))
        assert same(train(wrapped, batch), plain(name)), k
        assert step_peak(wrapped, batch) <= wrapped.get_expected_memory(), k


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_random_sequences_with_forms_train_bit_for_bit(name: str) -> None:
    """With check=True, too, so that what is held is what is charged."""
    expected = plain(name, steps=2)
    for seed in seeds(8):
        wrapped, batch = measured(name, check=seed % 2 == 0)
        sequence = random_sequence(wrapped.chain, seed, wildness=0.7, forms=True)
        assert same(train(with_sequence(wrapped, sequence), batch, steps=2), expected), str(sequence)
        wrapped.close()


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("name", ["residual", "language"])
def test_moved_forms_have_no_race(name: str, eagerness: float) -> None:
    """What a form stores travels; what it does not is redone after it has arrived."""
    expected = plain(name, steps=2)
    wrapped, _ = measured(name)
    for seed in seeds(4):
        link = RecordingLink(eagerness, seed)
        got, sequence = over(link, wrapped, name, seed)
        assert link.check() == [], str(sequence)
        assert same(got, expected), str(sequence)
        link.close()


def test_order_checker_notices_missing_wait_for_form() -> None:
    expected, noticed = plain("residual", steps=2), 0
    counting = Forgetful()
    wrapped, _ = measured("residual")
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


# -- finding


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


@pytest.mark.parametrize("middle", [InPlace, Drawing, Norm])
def test_hard_to_redo_operations_train_bit_for_bit(middle: type[nn.Module]) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(16, 32), middle(), nn.Tanh(), nn.Sequential(middle(), nn.Sigmoid()), nn.Linear(32, 4)
        )

    def batch() -> torch.Tensor:
        return torch.randn(8, 16)

    expected = train(make(), batch)
    wrapped = rotoff.Checkpointable(make(), check=True).measure(batch())
    assert any(stage.forms for stage in wrapped.chain.stages)
    for k in range(1, 5):
        wrapped.load_state_dict(make().state_dict())
        wrapped.zero_grad()
        with_sequence(wrapped, every_form(wrapped.chain, k))
        assert same(train(wrapped, batch), expected), k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forms_under_autocast_train_bit_for_bit(dtype: torch.dtype) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        blocks = [nn.Sequential(Attention(32, 4), Residual(32)) for _ in range(2)]
        return nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50))

    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        seen = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                loss = model(torch.randint(0, 50, (4, 12))).square().mean()
            model.zero_grad()
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return [*seen, torch.get_rng_state()]

    expected = run(make())
    wrapped = rotoff.Checkpointable(make())
    with torch.autocast("cpu", dtype=dtype):
        wrapped.measure(torch.randint(0, 50, (4, 12)))
    assert any(stage.forms for stage in wrapped.chain.stages)
    for k in range(1, 5):
        sequence = every_form(wrapped.chain, k)
        assert same(run(with_sequence(wrapped, sequence)), expected), k
