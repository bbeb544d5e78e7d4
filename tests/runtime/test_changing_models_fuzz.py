"""Random small models with a random change between their steps: to the bits of the plain model, in any mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from changing_models import Experts, again_backward
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from step_by_step import MODES, PATCH, Call, Row, one_step, verdict
from torch import nn
from torch.nn import functional as F
from trunks import WIDTH, Block, drawn

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
    """Does ``act(self, x, first, now)`` to what comes from the piece before, with the parts that it has."""

    act: Callable[..., torch.Tensor]
    has: dict[str, Callable[[], Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        for name, make in self.has.items():
            setattr(self, name, make())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def wide(piece: Any, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
    return piece.block(x)


def normed(piece: Any, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
    return x + F.gelu(piece.linear(piece.norm(x)))


def attends(piece: Any, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
    q, k, v = piece.qkv(x).view(4, ROWS // 4, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(ROWS, WIDTH)


def in_place(piece: Any, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
    y = torch.sin(x)
    y[:, :4] *= now.factor
    y += 0.1
    return F.relu(y, inplace=True)


def counts(piece: Any, x: torch.Tensor, first: torch.Tensor, now: Settings) -> torch.Tensor:
    piece.calls += 1
    piece.steps += 1
    return torch.sin(x * (piece.calls + float(piece.steps)) / 4)


class Whole(nn.Module):
    """Runs as a whole, since it uses ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.seen, self.last = linear(), nn.BatchNorm1d(WIDTH), [0.0], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.seen[-1] + random.random())
        self.last = torch.func.vmap(activation)(self.norm(self.linear(x)) * self.seen[-1])
        return self.last  # type: ignore[return-value]


def made_of(act: Callable[..., torch.Tensor], name: str = "", **has: Callable[[], Any]) -> type[Piece]:
    return type(name or act.__name__, (Piece,), {"act": act, "has": has})


WIDE = made_of(wide, block=Block)
PIECES = (
    WIDE,
    made_of(normed, norm=lambda: nn.BatchNorm1d(WIDTH), linear=linear),
    made_of(attends, qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH)),
    made_of(lambda piece, x, first, now: piece.dropout(torch.sin(x)), "drops", dropout=lambda: nn.Dropout(0.2)),
    made_of(lambda piece, x, first, now: 0.5 * (x + first), "skips"),
    made_of(in_place),
    made_of(lambda piece, x, first, now: piece.experts(x), "routes", experts=Experts),
    made_of(counts, calls=int, steps=lambda: nn.Buffer(torch.zeros(()))),
    made_of(lambda piece, x, first, now: piece.linear(x).tanh() if now.flag else x.sin(), "flags", linear=linear),
    made_of(lambda piece, x, first, now: activation(x * now.factor), "acts"),
    made_of(
        lambda piece, x, first, now: piece.linear(x).sin() if x.mean() > now.threshold else x.tanh(),
        "branches",
        linear=linear,
    ),
    made_of(lambda piece, x, first, now: x + piece.inner(x * now.factor), "whole", inner=Whole),
    made_of(lambda piece, x, first, now: torch.sin(x * (0.5 + random.random())), "by chance"),
)


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
            x = self.pieces[n].act(x, first, self.now)
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


def hooked(net: Program, n: int) -> None:
    for module in net.modules():
        if isinstance(module, Whole):
            if n % 2:
                module.handle = module.norm.register_forward_hook(lambda _module, _args, result: result * 0.5)
            elif n:
                module.handle.remove()  # type: ignore[union-attr, operator]


CHANGES = (hooked, flag, factor, threshold, function, order, fewer, more, rate, part_in_eval, part_frozen)
INFEASIBLE = (
    "refused: the training step needs at least"  # a change may ask for more than the limit that was given before
)


def call(n: int) -> Call:
    return (drawn(n, ROWS, WIDTH),), {}


@st.composite
def rows(draw: st.DrawFn) -> Row:
    # so that some can be spared
    kinds = [WIDE, WIDE, WIDE, *draw(st.lists(st.sampled_from(PIECES), min_size=2, max_size=5))]
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
