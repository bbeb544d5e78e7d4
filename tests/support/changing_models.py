"""Models whose behaviour changes between steps, each with the change: rows of the table in test_changing_models.py."""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
import random
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from step_by_step import PATCH, Call, error_of
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from trunks import LENGTH, WIDTH, Block, Long, Trunk, along, at, drawn, made_of, of_blocks, row, sets

HERE = sys.modules[__name__]


# -- arguments


class ByKeyword(Trunk):
    def forward(self, x: torch.Tensor, mask: Any = None, bias: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x if mask is None else x * mask.sigmoid()
            x = x if bias is None else x + bias.sigmoid()
        return self.head(x)


def by_keyword(n: int) -> Call:
    """Both in one order and in the other; one tensor under one keyword, then the other; an argument that is None."""
    a, b = drawn(n, of=1), drawn(n, of=2)
    keywords = ({"mask": a, "bias": b}, {"bias": b, "mask": a}, {"mask": a}, {"bias": a}, {"mask": None, "bias": a})
    return (drawn(n),), keywords[n]


row("tensors under other keywords", call=by_keyword)(ByKeyword)


def nested(n: int) -> Call:
    a, b, c = (drawn(n, of=k) for k in (1, 2, 3))
    return (drawn(n), [a, b], [c], {"a": a}) if n < 2 else (drawn(n), [a], [b, c], {"b": b}), {}


@row("arguments nested otherwise, and a dict of other keys", call=nested)
class Nested(Trunk):
    def forward(
        self, x: torch.Tensor, added: list[torch.Tensor], factors: list[torch.Tensor], given: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            for part in added:
                x = x + part.tanh()
            for part in factors:
                x = x * part.sigmoid()
            x = x * given["a"].sigmoid() if "a" in given else x + given["b"]
        return self.head(x)


class Power:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Power()"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.factor)


def numbers_of_all_kinds(n: int) -> Call:
    """And a callable that looks like another."""
    scales = (0.9 - 0.1 * n, numpy.float32(0.9 - 0.1 * n), torch.tensor(0.9 - 0.1 * n), (1.0, 2)[n % 2])
    return (drawn(n), Power(1.0 + n // 2), scales), {"flag": n + 1, "on": True}


@row("numbers as arguments", call=numbers_of_all_kinds)
@row(
    "flags, a string and a lambda as arguments",
    call=lambda n: (
        (drawn(n), (lambda x: x.sin()) if n < 2 else lambda x: x.cos(), ()),
        {"flag": n % 3, "on": n >= 2, "task": "sine" if n < 2 else "tanh"},
    ),
)
class Called(Trunk, heads=lambda: nn.ModuleDict({"sine": nn.Linear(WIDTH, 4), "tanh": nn.Linear(WIDTH, 6)})):
    def forward(self, x: torch.Tensor, act: Any, scales: Any, flag: int, on: bool, task: str = "sine") -> torch.Tensor:
        for block in self.blocks:
            x = act(block(x))
            for scale in scales:
                x = torch.sin(x * scale)
            if flag and on:
                x = torch.sin(x * flag)
        return self.heads[task](x)


@row("a batch of other sizes", call=lambda n: ((drawn(n, LENGTH - 2 * n, WIDTH),), {}))
@row(
    "a batch that lies otherwise",
    call=lambda n: ((drawn(n).t().contiguous().t() if n % 2 else drawn(n),), {}),
    room=0.6,
)
class Sizes(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * (1 + len(x) / 100) + x.stride(0) / 10)


# -- buffers and counts


@row("counts in a buffer, a dict, an attribute and lists")
class Counts(
    Trunk, step=lambda: nn.Buffer(torch.zeros(())), counts=lambda: {"steps": 0}, seen=int, history=list, means=list
):
    """Between its blocks, too; one of the lists is of what was computed."""

    def begin(self) -> None:
        self.step += 1
        self.counts["steps"] += 1

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.seen += 1
        self.history.append(0.1 * n)
        self.means.append(x.detach().abs().mean().item())
        counted = self.counts["steps"] * (1 + self.seen / 10) * (1 + sum(self.history))
        return torch.sin(x * (float(self.step) / 3) * counted) / (1 + self.means[-1])


class CountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return torch.sin(super().forward(x) * (1 + self.step.item() / 3))


row("a buffer of each block that counts and is read as a number")(made_of(CountingBlock))


def another_table(net: Any, n: int) -> None:
    if n >= 2:
        net.table = drawn(n, *((1, WIDTH), (LENGTH, WIDTH))[n % 2])


row("a buffer replaced by one of another shape", another_table)(
    along(lambda net, x, n: x * net.table.sigmoid(), table=lambda: nn.Buffer(torch.ones(WIDTH)))
)


class CounterAttribute(Trunk, count=int):
    def begin(self) -> None:
        self.count += 1

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * (1 + self.count / 3))


class CallsBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.sin(super().forward(x) * self.calls)


@row("what was computed for nothing is needed", sets("needed", lambda n: n >= 2))
class ForNothing(Trunk):
    """As a head whose output enters the loss from some step on."""

    needed = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        aside = torch.tanh(x * 2).sigmoid()
        return x + aside if self.needed and n == 1 else x


@row("a counter attribute of each block")
class CallsBlocks(Trunk):
    made_of, many = CallsBlock, 6


row("a counter attribute of each part of an nn.Sequential")(lambda: nn.Sequential(*[CallsBlock() for _ in range(5)]))


@row("a list of tensors of former steps grows")
class Queue(Trunk, former=list):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if n == 1:
            x = x + sum((part * 0.1 for part in self.former), torch.zeros(()))
            self.former.append(x.detach().mean(0))
        return x


@row("running averages that the forward replaces")
class Averages(Trunk, average=lambda: nn.Buffer(torch.ones(WIDTH))):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
        return x / self.average


# -- what lies outside of the model

SCALE = 1.0
SCALE_HERE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE_HERE", default=1.0)


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


OfGlobal = along(lambda net, x, n: torch.sin(x * SCALE))


def with_cell() -> nn.Module:
    """Reads a closure's cell, a context variable, an environment variable, another module's namespace and globals."""
    scale = 1.0

    def act(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        factor = SCALE * scale * SCALE_HERE.get() * float(os.environ.get("SCALE_OF_TESTS", "1"))
        return torch.sin(x * factor * getattr(F, "rotoff_scale", 1.0))

    def tell(to: float) -> None:
        nonlocal scale
        scale = to

    return along(act, tell=lambda: tell)()


def change_outside(net: Any, n: int) -> None:
    """One thing a step."""
    changes: tuple[Callable[[], object], ...] = (
        lambda: PATCH.setattr(HERE, "SCALE", 1.1),
        lambda: PATCH.setattr(F, "rotoff_scale", 1.2, raising=False),
        lambda: net.tell(1.3),
        lambda: SCALE_HERE.set(1.4),
        lambda: PATCH.setenv("SCALE_OF_TESTS", "1.5"),
    )
    changes[n]()


row("a global, a namespace, a closure's cell, a context variable, an environment variable", change_outside)(with_cell)


def functions_replaced(net: Any, n: int) -> None:
    if n == 2:
        PATCH.setattr(HERE, "activation", torch.tanh)
    if n == 3:
        PATCH.setattr(F, "softsign", torch.tanh)


row("functions of the namespace and of torch replaced", functions_replaced)(
    along(lambda net, x, n: F.softsign(activation(x)))
)


def method_replaced(net: Any) -> None:
    for block in net.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: 0.5 * torch.sin(inner(x))


def class_method_replaced(net: Any) -> None:
    inner = Block.forward
    PATCH.setattr(Block, "forward", lambda self, x: torch.sin(inner(self, x)))


row("the forward of blocks replaced", at(2, method_replaced))(Trunk)
row(
    "a method of the model replaced",
    at(2, lambda net: setattr(net, "along", lambda x, n: torch.sin(x * (n + 1)))),
)(Trunk)
row("a method of a class replaced", at(2, class_method_replaced))(Trunk)


class ActBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act: Any = torch.sin
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.act(x * self.scale))


ActBlocks = made_of(ActBlock)
row("a lambda replaced", of_blocks("act", lambda n: (lambda x: x.sin()) if n < 2 else (lambda x: x.cos())))(ActBlocks)


def numbers_of_blocks(net: Any, n: int) -> None:
    for block in net.blocks:
        block.act = functools.partial(torch.mul, other=1.0 + n // 2)
        block.scale = 1.0 - 0.1 * n


row("a functools.partial and an attribute of each block, of other numbers", numbers_of_blocks)(ActBlocks)


def filled(array: numpy.ndarray, n: int) -> numpy.ndarray:
    array[:] = numpy.sin(numpy.arange(len(array)) * (n + 1.0))
    return array


def refills(as_tensor: Callable[[numpy.ndarray], torch.Tensor]) -> type[Trunk]:
    return along(
        lambda net, x, n: torch.sin(x + as_tensor(filled(net.room, n))),
        room=lambda: numpy.zeros(WIDTH, dtype=numpy.float32),
    )


row("an array filled again after each block, as_tensor")(refills(lambda array: torch.as_tensor(array)))
row("an array filled again after each block, from_numpy")(refills(lambda array: torch.from_numpy(array)))


def five_numbers() -> Iterator[float]:
    return iter([1.0, 0.5, 2.0, 1.5, 3.0])


def numbers() -> Iterator[float]:
    for n in itertools.count():
        yield 1.0 + n / 10


def rewound(net: Any) -> None:
    net.of_forward, net.of_blocks, net.generator = five_numbers(), itertools.count(1), numbers()


@row("iterators that each forward and each block take from", again=rewound)
class Iterates(
    Trunk, scale=lambda: 1.0, of_forward=five_numbers, of_blocks=lambda: itertools.count(1), generator=numbers
):
    def begin(self) -> None:
        self.scale = next(self.of_forward, 7.0)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * self.scale * (1 + next(self.of_blocks) / 10) * next(self.generator))


# -- modules and parameters that change


def swapped(net: Any) -> None:
    torch.manual_seed(5)
    net.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def reordered(net: Any) -> None:
    net.blocks = nn.ModuleList([net.blocks[k] for k in (2, 0, 3, 1)])


row("a submodule swapped for another", at(2, swapped), stages=8)(Trunk)
row("a list of modules put in another order", at(2, reordered))(Trunk)


@row("modules run in another order", sets("order", lambda n: [(k + n) % 4 for k in range(4)]))
class Ordered(Trunk, order=lambda: [0, 1, 2, 3]):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in self.order:
            x = self.blocks[k](x)
        return self.head(x)


def parts_exchanged(net: Any) -> None:
    net[1], net[3] = net[3], net[1]


row("parts of an nn.Sequential put in another order", at(2, parts_exchanged))(
    lambda: nn.Sequential(*[Block() for _ in range(5)])
)


def requires(when: Callable[[int], bool]) -> Callable[[Any, int], object]:
    return lambda net, n: [block.requires_grad_(when(n)) for block in net.blocks[:2]]


row("a part frozen", requires(lambda n: n < 2))(Trunk)
row("a part thawed", requires(lambda n: n >= 2), room=0.6)(Trunk)
row("a bias frozen", lambda net, n: net.blocks[1].up.bias.requires_grad_(n % 2 == 0))(Trunk)


@row("a tied weight")
class Tied(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


def untied(net: Any) -> None:
    net.blocks[2].up.weight = nn.Parameter(net.blocks[0].up.weight.detach().clone())


row("a tied weight untied", at(2, untied))(Tied)


def parameter_replaced(net: Any, n: int) -> None:
    if n >= 2:
        net.blocks[1].up.weight = nn.Parameter(0.1 * drawn(n, 4 * WIDTH, WIDTH))


row("a parameter replaced", parameter_replaced)(Trunk)
row("a parameter's data replaced", at(
    2, lambda net: setattr(net.blocks[1].up.weight, "data", 0.1 * drawn(2, 4 * WIDTH, WIDTH))
))(Trunk)  # fmt: skip
row(
    "model.double() between steps",
    at(2, lambda net: net.double()),
    call=lambda n: ((drawn(n).double() if n >= 2 else drawn(n),), {}),
    room=0.8,
    stages=8,
)(Long)


@row(
    "the default dtype changed",
    lambda net, n: torch.set_default_dtype(torch.float32 if n < 2 else torch.float64),
    room=0.7,
)
class DefaultType(Long):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x.double() + torch.full((WIDTH,), 0.1)).float()


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]


@row("batch norm")
@row(
    "batch norm of another momentum",
    lambda net, n: [setattr(b.norm, "momentum", (0.1, 0.5)[n >= 2]) for b in net.blocks],
)
@row(
    "batch norm without momentum, which counts", lambda net, n: [setattr(b.norm, "momentum", None) for b in net.blocks]
)
@row("batch norm of some parts in eval()", lambda net, n: [b.train(n < 2) for b in net.blocks[:2]])
class BatchNorms(Trunk):
    made_of = NormBlock


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Trunk()
        for block in net.blocks:
            block.up = norm(block.up)
        return net

    return make


row("spectral norm")(normed(nn.utils.parametrizations.spectral_norm))
row("weight norm")(normed(nn.utils.parametrizations.weight_norm))
row("weight norm added", at(2, lambda net: nn.utils.parametrizations.weight_norm(net.blocks[1].up)), room=0.5)(Trunk)


# -- how it computes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backend = SDPBackend.MATH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.sin(x + self.out(y.transpose(1, 2).reshape(b, t, w)))


def sequences(n: int) -> Call:
    return (drawn(n, 2, 12, WIDTH),), {}


@row("attention by a kernel that the forward names", call=sequences)
@row(
    "attention by another kernel",
    of_blocks("backend", lambda n: (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)[n % 2]),
    call=sequences,
    room=0.5,
)
class Attends(Trunk):
    made_of = Attention


@row("autocast inside the forward turned on", sets("low", lambda n: n >= 3), room=0.6)
@row("autocast inside the forward", sets("low", lambda n: True), room=0.6)
class Autocast(Long):
    low = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
                x = block(x).float()
        return self.head(x)


def under_autocast(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=n >= 3):
        loss = error_of(run(*call[0]))
    loss.backward()
    return loss


row("autocast around the model turned on", step=under_autocast, room=0.8)(Long)


class PartlyLow(Block):
    """Switches off what may be on around the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ self.up.weight.T @ self.down.weight.T)


row("autocast inside the forward turned off", step=under_autocast, room=0.8)(made_of(PartlyLow, Long))


class Switched(Trunk):
    """Runs its second block in another way, while that is on."""

    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = self.way(block, x) if n == 1 else block(x)
        return self.head(x)

    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@row("a part without gradients")
@row("a part without gradients, turned on and off", sets("on", lambda n: n % 2 == 0), room=0.5)
class NoGrad(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.on):
            y = block(x)
        return x + y


@row("a detached part")
@row("a part detached, then not", sets("on", lambda n: n < 2), room=0.5)
class Detached(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        return x + (y.detach() if self.on else y)


@row("torch.utils.checkpoint inside the model")
@row("torch.utils.checkpoint turned off", sets("on", lambda n: n < 2), room=0.5)
class Checkpointed(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.on else block(x)


@row("torch.utils.checkpoint inside the model, the reentrant one")
class Reentrant(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=True)


# -- courses that data choose


def of_both_signs(n: int) -> Call:
    return (drawn(n) + (1, -1)[n % 2],), {}


@row("a branch on data", call=of_both_signs)
class Branch(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = torch.sin(x)
        return self.head(x)


class Experts(nn.Module):
    """Sends each row to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            if len(rows):
                y.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return torch.sin(x + y)


row("routing to one expert", call=lambda n: ((3 * drawn(n),), {}), room=0.6, stages=8)(made_of(Experts))


row("sizes that data choose, by masked_select", room=0.6)(
    along(lambda net, x, n: x + torch.masked_select(x, x > 0).sin().mean())
)


@row("sizes that data choose, by a mask as index", room=0.6)
class Indexed(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = x[x.mean(1) > -0.2]
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


@row(".tolist() of what was computed")
class ToList(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        a, b = x.detach().abs().mean(0)[:2].tolist()
        return torch.sin(x * a + b)


@row("a loop until the data say so", call=lambda n: ((drawn(n) * (1 + 3 * (n % 3)),), {}), room=0.8)
class Until(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, times = self.blocks[0](x), 0
        while x.abs().max() > 2.0 and times < 6:
            x, times = 0.5 * self.blocks[1](x), times + 1
        return self.head(self.blocks[3](self.blocks[2](x)))


@row("an error of torch that the forward catches", call=lambda n: ((drawn(n, LENGTH - 4 * (n % 2), WIDTH),), {}))
class CaughtOfTorch(Trunk, table=lambda: nn.Parameter(torch.ones(LENGTH, WIDTH))):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        try:
            return torch.sin(x * self.table)
        except RuntimeError:
            return torch.tanh(x)


# -- chance


def large(n: int) -> Call:
    """So large that the random states that replays keep weigh little."""
    return (drawn(n, 4 * LENGTH, WIDTH),), {}


Dropout = along(lambda net, x, n: net.drops[n](x), drops=lambda: nn.ModuleList(nn.Dropout(0.3) for _ in range(4)))
row("parts in train() that were in eval()", lambda net, n: [d.train(n >= 3) for d in net.drops], call=large, room=0.8)(
    Dropout
)
row("dropout in eval()", lambda net, n: [d.train(n < 3) for d in net.drops], call=large)(Dropout)
row("dropout of another rate", lambda net, n: [setattr(d, "p", 0.1 * (n + 1)) for d in net.drops], call=large)(Dropout)
row("dropout", call=large)(Dropout)


def dropped_by(chance: Callable[[], float]) -> type[Trunk]:
    class Drops(Long):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if chance() > 0.3:
                    x = block(x)
            return self.head(x)

    return Drops


# the sample's draws may leave out more than a later step does
row("layers dropped by Python's chance", room=0.7)(dropped_by(random.random))
row("layers dropped by torch's chance", room=0.7)(dropped_by(lambda: torch.rand(()).item()))
row("layers dropped by NumPy's chance", room=0.7)(dropped_by(lambda: numpy.random.uniform()))


def factor_by(chance: Callable[[], float]) -> type[Trunk]:
    return along(lambda net, x, n: torch.sin(x * (0.5 + chance())))


row("factors drawn by torch, Python and NumPy")(
    factor_by(lambda: torch.rand(()).item() + random.random() + numpy.random.random())
)


@row("torch.manual_seed of a count inside the forward")
class SeedsOfCount(CounterAttribute):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        torch.manual_seed(self.count)
        return F.dropout(x, 0.3)


@row("chance of its own for each block, by fork_rng")
class Forks(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(n)
            x = F.dropout(x, 0.3)
        return F.dropout(x, 0.1)


# -- hooks


def halves(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.sin(output)


def halves_gradients(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(None if gradient is None else 0.5 * gradient for gradient in gradients)


def hooked(register: str, hook: Callable[..., Any], first: int = 2, last: int = 99) -> Callable[[Any, int], object]:
    def change(net: Any, n: int) -> None:
        if n == 0:
            net.handles = []
        if n == first:
            net.handles = [getattr(block, register)(hook) for block in net.blocks[1:]]
        if n == last:
            for handle in net.handles:
                handle.remove()

    return change


for _name, _change in {
    "a forward hook added": hooked("register_forward_hook", halves),
    "a forward hook added and removed": hooked("register_forward_hook", halves, 1, 3),
    "a forward pre-hook added": hooked("register_forward_pre_hook", lambda module, args: (torch.sin(args[0]),)),
    "a full backward hook added": hooked("register_full_backward_hook", halves_gradients),
    "a full backward hook from the first step": hooked("register_full_backward_hook", halves_gradients, 0),
    "a full backward pre-hook added": hooked("register_full_backward_pre_hook", lambda module, grad: (0.5 * grad[0],)),
}.items():
    row(_name, _change, room=0.8)(Long)


def counting_hook(net: Any) -> None:
    net.calls = 0

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        net.calls += 1
        return torch.sin(output * (1 + net.calls / 10))

    for block in net.blocks:
        block.register_forward_hook(count)


row("a forward hook that counts", at(0, counting_hook))(Trunk)


@row("a hook on a tensor inside the forward, of another factor", sets("factor", lambda n: 1.0 - 0.2 * n))
class TensorHookOf(Trunk):
    factor = 1.0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        factor = self.factor
        if x.requires_grad:
            x.register_hook(lambda grad: factor * grad)
        return torch.sin(x)


row("a hook on a parameter added", at(
    2, lambda net: net.blocks[1].up.weight.register_hook(lambda grad: 0.5 * grad)
))(Trunk)  # fmt: skip


# -- what the forward leaves and returns


def with_penalty(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0])) + 0.1 * net.penalty
    loss.backward()
    net.penalty = None
    return loss


@row("a tensor of the graph in an attribute, in the loss", step=with_penalty, room=0.6)
class Penalty(Trunk):
    penalty: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = torch.zeros(())
        for block in self.blocks:
            x = block(x)
            self.penalty = self.penalty + x.square().mean()
        return self.head(x)


Named = namedtuple("Named", "y x")


@row("outputs of another structure", sets("kind", lambda n: ("one", "tuple", "dict", "named", "one")[n]), room=0.6)
class Structures(Trunk):
    kind = "one"

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        y = self.head(x)
        return {"one": y, "tuple": (y, [x]), "dict": {"y": y, "x": x, "n": 3}, "named": Named(y, x)}[self.kind]


def part_of(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    hidden = run(*call[0])
    loss = error_of(hidden[: 1 + n])
    loss.backward()
    return loss


@row("a loss of another part of the outputs", step=part_of, room=0.6)
class Hidden(Trunk):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return [self.head(x), *hidden]


@row("fewer layers by an argument", call=lambda n: ((drawn(n),), {"layers": 8 - n % 3}))
@row("more layers by an argument", call=lambda n: ((drawn(n),), {"layers": (6, 8, 6, 5, 10)[n]}), room=0.7)
class EarlyExit(Long):
    def forward(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for block in self.blocks[:layers]:
            x = block(x)
        return self.head(x)


@row("a recurrence over the input's length", call=lambda n: ((drawn(n, 6 - n, 8, WIDTH),), {}))
class OverLength(Trunk, cell=lambda: nn.GRUCell(WIDTH, WIDTH)):
    many = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[1], WIDTH)
        for part in x:
            h = self.blocks[0](self.cell(part, h))
        return self.head(h)


@row("a long skip connection enabled", sets("skip", lambda n: n >= 2), room=0.6)
@row("a long skip connection disabled", sets("skip", lambda n: n < 2))
class Skips(Trunk):
    skip = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        y = self.blocks[2](second) + second
        y = self.blocks[3](y)
        return self.head(y + first if self.skip else y)


# -- autograd's own


class Clipped(torch.autograd.Function):
    """Goes by a number of its class, in its forward and in its backward."""

    level = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.level = Clipped.level
        return torch.sin(x * Clipped.level)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x * ctx.level) * ctx.level


row("a function of autograd whose number changes", lambda net, n: PATCH.setattr(Clipped, "level", 1.0 + n // 2))(
    along(lambda net, x, n: Clipped.apply(torch.tanh(x)))
)


@row("a gradient by the input inside the forward", room=0.8, may_refuse="differentiates")
class Force(Trunk):
    """As models of molecules do, whose forces are a derivative of their energy."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


# -- in place


@row("what was computed changed in place, in some steps", sets("on", lambda n: n >= 2))
class InPlaceSometimes(Trunk):
    on = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        if self.on:
            y += x
            y.mul_(0.7)
        return y * 0.7 if self.on else y.relu_()


@row("a skip connection changed in place")
class SkipInPlace(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](x))
        h += torch.tanh(self.blocks[2](h.clone()))
        return self.head(self.blocks[3](h))


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


row("an activation in place, in some steps", sets("on", lambda n: n % 2 == 1), stages=12)(
    along(lambda net, x, n: F.relu(x, inplace=net.on) * 1.5, of=made_of(Wide, Long), on=bool)
)


@row("residuals added in place, others in each step", sets("odd", lambda n: n % 2), stages=8)
class ResidualInPlace(Trunk):
    many = 8
    made_of = Wide
    odd = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for k, block in enumerate(self.blocks[1:]):
            y = torch.tanh(block(x * 1.0))
            if k % 2 == self.odd:
                x += y
            else:
                x = x + y
        return self.head(x)


class Earlier(Trunk):
    """Changes the first block's output in place, in some steps, after later blocks have read it."""

    on = False

    def change(self, whole: torch.Tensor, view: torch.Tensor, k: int) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        view, y = x[:, :8], x * 2.0
        for k, block in enumerate(self.blocks[1:]):
            y = block(y)
            if self.on:
                self.change(x, view, k)
            y = y + x + view.mean()
        return self.head(y)


for how, change in {
    "itself": lambda net, whole, view, k: whole.mul_(0.5),
    "by a view": lambda net, whole, view, k: view.mul_(0.5),
    "by a view of a view": lambda net, whole, view, k: view.t()[k].zero_(),
    "the whole and a view": lambda net, whole, view, k: (view if k % 2 else whole).mul_(0.5),
    "by what is detached": lambda net, whole, view, k: whole.detach().mul_(0.5),
    "without gradients": torch.no_grad()(lambda net, whole, view, k: whole.clamp_(-0.1, 0.1)),
    "by a mask": lambda net, whole, view, k: whole.__setitem__(whole.detach() > 0.2, 0.0),
}.items():
    row(f"an earlier result changed in place, in some steps: {how}", sets("on", lambda n: n % 2 == 1), room=0.3)(
        type("Changes", (Earlier,), {"change": change})
    )


@row("a view changed in place", sets("width", lambda n: 4 + n))
class View(Trunk):
    width = 4

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 1.5
        y[:, : self.width].mul_(0.5)
        y.t()[0].add_(1.0)
        y[:, self.width :].tanh_()
        return y


@row("views changed in place and read when their base is needed no more")
class ViewsOutlive(Trunk):
    many = 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        rows, column = x.unflatten(0, (-1, 4))[1], x[:, 3]
        rows.add_(1.0)
        y = self.blocks[1](x * 2.0) + x
        column.mul_(0.2)
        y = torch.sin(y + x + rows.mean() + column.mean())
        for block in self.blocks[2:]:
            y = block(y)
        return self.head(y)


row("scatter_ into what was computed")(
    along(lambda net, x, n: torch.zeros_like(x).scatter_(1, x.detach().argsort(1), torch.sin(x)) + x)
)


@row("index_put_ into what was computed", sets("rows", lambda n: [n, n + 1]))
class IndexPut(Trunk):
    rows = [0, 1]

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        y[self.rows] = x[: len(self.rows)] * 0.5
        y[x > 1.5] = 0.0
        return y


@row("the batch changed in place by the forward", room=0.4)
class InPlaceBatch(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return super().forward(x)


# -- caches


def rotary(length: int) -> torch.Tensor:
    return torch.outer(torch.arange(length, dtype=torch.float32), torch.linspace(1, 0.1, WIDTH)).cos()


@row("a table made in the first forward")
class Rotary(Trunk, cache=lambda: None):
    many = 8

    def begin(self) -> None:
        if self.cache is None:
            self.cache = rotary(LENGTH)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * self.cache[: len(x)]


@row("a table that grows", call=lambda n: ((drawn(n, (10, 12, 10, 16, 9)[n], WIDTH),), {}), room=0.7, stages=8)
class GrowingTable(Rotary):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or len(self.cache) < len(x):
            self.cache = rotary(len(x))
        return super().forward(x)


@row("a memory of the step before", again=lambda net: setattr(net, "memory", None), room=0.8)
class Memory(Trunk):
    memory: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.memory is not None:
            x = x + 0.5 * self.memory
        self.memory = x.detach()
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class OfTheGraphBefore(Trunk, table=lambda: nn.Parameter(0.1 * torch.ones(WIDTH)), count=int, memory=lambda: None):
    """Keeps a result with its graph; the next step reads its numbers alone."""

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n else self.first(x)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        old, self.memory = self.memory, x * self.table
        return x if old is None else x + self.numbers(old)

    def numbers(self, old: torch.Tensor) -> torch.Tensor:
        return old.detach()


def forgets(net: Any) -> None:
    net.memory, net.count = None, 0


@row("a result of the step before, detached", again=forgets, room=0.8)
class DetachedBefore(OfTheGraphBefore):
    pass


@row("a result of the step before, read without gradients", again=forgets, room=0.8)
class SmoothedBefore(OfTheGraphBefore):
    def numbers(self, old: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return 0.5 * old + 0.1


@row("a table made by every second step, and read detached by the others", again=forgets, room=0.5)
class EverySecond(OfTheGraphBefore):
    def first(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        made = self.memory is None or self.count % 2
        self.memory = torch.softmax(self.table, 0) if made else self.memory.detach()
        return x + self.memory


@row("a result with its graph that later steps read, too", sets("on", lambda n: n > 0), again=forgets, room=0.8)
class WithItsGraph(OfTheGraphBefore, on=bool):
    """Plain PyTorch lets it, since an addition saves nothing; it cannot be recorded, so steps go on as they are."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        if self.on and self.memory is None:
            self.memory = self.table + 0
        return x + self.memory if self.on else x


# -- steps of other kinds


def two_forwards(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    (x,), _ = call
    loss = error_of(run(x)) + error_of(run(x.flip(0) * 0.5))
    loss.backward()
    return loss


def crossed(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    (x,), _ = call
    first = error_of(run(x))
    second = error_of(run(x.flip(0) * 0.5))
    first.backward()
    second.backward()
    return first + second


def between(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    """What the forward reads has changed by the time of its backward."""
    first = error_of(run(*call[0]))
    PATCH.setattr(HERE, "SCALE", SCALE + 1.0)
    second = error_of(run(*call[0]))
    first.backward()
    second.backward()
    PATCH.setattr(HERE, "SCALE", SCALE - 1.0)
    return first + second


def evaluates(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    net.eval()
    with torch.no_grad():
        run(*call[0])
    net.train()
    run.train()
    loss = error_of(run(*call[0]))
    loss.backward()
    return loss


row("two forwards before one backward", step=two_forwards)(Trunk)
row("two forwards before one backward, that count", step=two_forwards)(CallsBlocks)
row("two forwards before two backwards", step=crossed, call=large)(Dropout)
row("two forwards before two backwards, the global between them", step=between)(OfGlobal)
row("an evaluation between steps, that counts", step=evaluates)(CallsBlocks)


def changed_before_backward(change: Callable[[Any, Call], object], steps: tuple[int, ...] = (2,)) -> Any:
    def step(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
        loss = error_of(run(*call[0]))
        if n in steps:
            with torch.no_grad():
                change(net, call)
        loss.backward()
        return loss

    return step


BY_OTHERS = r"modified by an inplace operation|modified in.?place|changed in place"
batch_zeroed = changed_before_backward(lambda net, call: call[0][0].zero_())


@row("the batch changed in place before the backward", step=batch_zeroed, raises=BY_OTHERS)
class FirstOfAll(Trunk, first=lambda: nn.Linear(WIDTH, WIDTH)):
    """Its first layer saves the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


@row("a batch that nothing saves changed in place before the backward", step=batch_zeroed, may_refuse=BY_OTHERS)
class AddsAtFirst(Trunk):
    """Saves nothing of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 1.0)


row("a weight changed in place before the backward", step=changed_before_backward(
    lambda net, call: net.blocks[1].up.weight.mul_(0.5)
), raises=BY_OTHERS)(Trunk)  # fmt: skip
row("a bias changed in place before the backward", step=changed_before_backward(
    lambda net, call: net.blocks[1].up.bias.add_(1.0)
), may_refuse=rf"{BY_OTHERS}|bias")(Trunk)  # fmt: skip
row("a buffer changed in place before the backward", step=changed_before_backward(
    lambda net, call: net.step.add_(3.0)
))(Counts)  # fmt: skip
row("an attribute changed before the backward", step=changed_before_backward(
    lambda net, call: setattr(net, "count", net.count + 3)
))(CounterAttribute)  # fmt: skip
row("parts put in eval() before the backward", step=changed_before_backward(
    lambda net, call: net.eval(), (0, 2, 4)
), call=large, change=lambda net, n: net.train())(Dropout)  # fmt: skip


def twice(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=n >= 2, allow_unused=True)
    total = loss + (sum(g.square().sum() for g in gradients) if n >= 2 else 0)
    if n >= 2:
        total.backward()
    return total


def again_backward(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward(retain_graph=True)
    loss.sin().backward(retain_graph=n > 2)
    if n > 2:
        loss.cos().backward()
    return loss


def gradient_of_each(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    """The gradients of two losses, which the caller weights; that of the head alone is asked for first."""
    result = run(*call[0])
    losses = error_of(result), result.abs().mean()
    heads = [torch.autograd.grad(loss, net.head.weight, retain_graph=True)[0].norm() for loss in losses]
    parameters = list(net.parameters())
    both = [torch.autograd.grad(loss, parameters, retain_graph=loss is losses[0]) for loss in losses]
    for parameter, one, other in zip(parameters, *both, strict=True):
        parameter.grad = one + other * heads[0] / heads[1]
    return losses[0] + losses[1]


row("a double backward", step=twice)(Trunk)
row("a second and a third backward through the same graph", step=again_backward)(Trunk)
row("a second backward through batch norm and dropout", step=again_backward, call=large)(Dropout)
row("a backward for each of two losses", step=gradient_of_each)(Trunk)


def apart(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    one, other = (result.square().mean() for result in run(*call[0]))
    (one if n % 2 else other).backward()
    (other if n % 2 else one).backward()
    return one + other


def updated_between(first: int) -> Any:
    def step(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
        losses = [result.square().mean() for result in run(*call[0])]
        losses[first].backward()
        with torch.no_grad():
            net.towers[first].head.weight.mul_(0.9)
        losses[1 - first].backward()
        return losses[0] + losses[1]

    return step


class Short(Trunk):
    many = 3


@row("the first tower updated before the backward of the last", step=updated_between(0), refused="changed in place")
@row("the last tower updated before the backward of the first", step=updated_between(1))
@row("a backward for each of two towers", step=apart)
class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Short(), Short()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


def emptied(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    for result in net.left:
        result.detach().zero_()
    loss.backward()
    return loss


@row("results left in an attribute, changed before the backward", step=emptied, may_refuse="changed in place between")
class Leaves(Trunk, left=list):
    def begin(self) -> None:
        self.left = []

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.left = [*self.left, x]
        return x * 1.5


def left(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    if n != 2:
        loss.backward()
    return loss


row("a forward that no backward follows", step=left)(CallsBlocks)


@row("an error that the forward raises in a step", sets("fails", lambda n: n == 2), raises="no such step")
class Raises(CallsBlocks):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = block(x)
            if n == 2 and self.fails:
                raise RuntimeError("no such step")
        return self.head(x)


row("AdamW, a factor in each step another", of_blocks("scale", lambda n: 1.0 - 0.1 * n), adam=True)(ActBlocks)
row("AdamW, thawed parts", requires(lambda n: n >= 2), room=0.6, adam=True, call=large)(Dropout)


@row("the default dtype changed in the middle of the forward")
@row("the default dtype changed between forward and backward", step=lambda *given: between_dtypes(*given))
class TablesInDouble(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        table = torch.linspace(0, 1, x.shape[-1]) / 3
        torch.set_default_dtype(torch.float32)
        return torch.sin(x.double() * table).float() * (torch.linspace(0, 1, x.shape[-1]) / 3)


def between_dtypes(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    torch.set_default_dtype(torch.float64)
    loss.backward()
    torch.set_default_dtype(torch.float32)
    return loss


def quantizers() -> nn.Module:
    whole = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
    made = nn.ModuleList(FusedMovingAvgObsFakeQuantize(**whole) for _ in range(4))
    for one in made:
        one.disable_observer()
        one.disable_fake_quant()
    return made


@row(
    "fake quantization switched on, whose statistics PyTorch changes uncounted",
    lambda net, n: [
        switch(n >= 1) for one in net.quantizers for switch in (one.enable_observer, one.enable_fake_quant)
    ],
)
class Quantized(Trunk, quantizers=quantizers):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.quantizers[n](torch.sin(x))


@row("a buffer made in one step and removed in the next")
class NowAndThen(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if hasattr(self, f"mean{n}"):
            x = x + getattr(self, f"mean{n}")
            delattr(self, f"mean{n}")
        else:
            self.register_buffer(f"mean{n}", x.detach().mean(0))
        return torch.sin(x)
