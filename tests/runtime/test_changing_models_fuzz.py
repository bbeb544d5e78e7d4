"""Random small models with a random change between their steps: to the bits of the plain model, in any mode."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from changing_models import WIDTH, Block, Experts, again_backward, drawn
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from step_by_step import MODES, PATCH, Call, Row, one_step, verdict
from torch import nn
from torch.nn import functional as F

ROWS = 48
STEPS = 4
HERE = sys.modules[__name__]


@dataclass
class Settings:
    """What blocks read in each step, and changes change."""

    flag: bool = False
    factor: float = 1.0
    threshold: float = 0.0
    order: list[int] = field(default_factory=list)


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


class Piece(nn.Module):
    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        raise NotImplementedError


class Wide(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return self.block(x)


class Normed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Attends(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        q, k, v = self.qkv(x).view(4, ROWS // 4, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(ROWS, WIDTH)


class Drops(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return self.dropout(torch.sin(x))


class Skips(Piece):
    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return 0.5 * (x + first)


class InPlace(Piece):
    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        y = torch.sin(x)
        y[:, :4] *= now.factor
        y += 0.1
        return F.relu(y, inplace=True)


class Routes(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return self.experts(x)


class Counts(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        self.calls += 1
        self.steps += 1
        return torch.sin(x * (self.calls + float(self.steps)) / 4)


class Flags(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return torch.tanh(self.linear(x)) if now.flag else torch.sin(x)


class Acts(Piece):
    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return activation(x * now.factor)


class Branches(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return torch.sin(self.linear(x)) if x.mean() > now.threshold else torch.tanh(x)


class ByChance(Piece):
    def run(self, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
        return torch.sin(x * (0.5 + random.random()))


PIECES = (Wide, Normed, Attends, Drops, Skips, InPlace, Routes, Counts, Flags, Acts, Branches, ByChance)


class Program(nn.Module):
    """Its pieces, in the order that the settings say."""

    def __init__(self, kinds: list[type[Piece]]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(kind() for kind in kinds)
        self.last = nn.Parameter(torch.ones(WIDTH))  # never frozen
        self.now = Settings(order=list(range(len(kinds))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for n in self.now.order:
            x = self.pieces[n].run(x, first, self.now)
        return x * self.last


def flag(net: Program, n: int) -> None:
    net.now.flag = n % 2 == 1


def factor(net: Program, n: int) -> None:
    net.now.factor = 1.0 - 0.2 * n


def threshold(net: Program, n: int) -> None:
    net.now.threshold = (-9.0, 9.0)[n % 2]


def function(net: Program, n: int) -> None:
    if n == 2:
        PATCH.setattr(HERE, "activation", torch.tanh)


def order(net: Program, n: int) -> None:
    if n:
        net.now.order = [*net.now.order[1:], net.now.order[0]]


def fewer(net: Program, n: int) -> None:
    if n == 2:
        del net.now.order[-2:]


def more(net: Program, n: int) -> None:
    if n == 2:
        net.now.order = [*net.now.order, net.now.order[0]]


def rate(net: Program, n: int) -> None:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2 + 0.1 * n


def part_in_eval(net: Program, n: int) -> None:
    for module in net.pieces[::2]:
        module.train(n < 2)


def part_frozen(net: Program, n: int) -> None:
    for module in net.pieces[::2]:
        module.requires_grad_(n % 2 == 0)


CHANGES = (flag, factor, threshold, function, order, fewer, more, rate, part_in_eval, part_frozen)
INFEASIBLE = (
    "refused: the training step needs at least"  # a change may ask for more than the limit that was given before
)


def call(n: int) -> Call:
    return (drawn(n, ROWS, WIDTH),), {}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    # so that some can be spared
    kinds = [Wide, Wide, Wide, *draw(st.lists(st.sampled_from(PIECES), min_size=2, max_size=5))]
    kinds = draw(st.permutations(kinds))
    changes = draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=2, unique=True))

    def change(net: Any, n: int) -> None:
        for one in changes:
            one(net, n)

    step, room = draw(st.sampled_from((one_step, again_backward))), draw(st.sampled_from((0.2, 0.4, 0.6)))
    name = f"{[kind.__name__ for kind in kinds]}, {[one.__name__ for one in changes]}, {step.__name__}"
    return Row(name, partial(Program, kinds), call, change, step=step, room=room, steps=STEPS)


# Nothing is shrunk: what is drawn is small, and each attempt takes a measurement.
@settings(max_examples=settings().max_examples // 2, phases=(Phase.explicit, Phase.generate))
@given(row=rows(), mode=st.sampled_from(MODES))
def test_random_models_that_change_train_as_the_plain_model_does(row: Row, mode: str) -> None:
    said = verdict(row, mode)
    note(f"{row.name}, {mode}, room {row.room}")
    assume(not said.startswith(("no plan", INFEASIBLE)))
    assert said == "equal"
