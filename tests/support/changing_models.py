"""Models whose behaviour changes between steps, each with the change: the rows of the table in test_changing_models.py.

``PYTHONPATH=. python tests/support/changing_models.py [part of a name ...]`` prints what becomes of each row in each
mode.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import os
import random
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from step_by_step import PATCH, Call, Row, error_of, nothing, print_table
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WIDTH = 16
LENGTH = 16  # rows of a batch
HERE = sys.modules[__name__]

TABLE: list[Row] = []


def drawn(n: int, *shape: int, of: int = 0) -> torch.Tensor:
    """The same numbers for the same `n` and `of`, whatever else is drawn."""
    return torch.randn(
        *(shape or (LENGTH, WIDTH)), generator=torch.Generator().manual_seed(1000 + 10 * n + of), dtype=torch.float32
    )


def batch(n: int) -> Call:
    return (drawn(n),), {}


def row(
    name: str, change: Callable[[Any, int], object] = nothing, call: Callable[[int], Call] = batch, **more: Any
) -> Any:
    """Enters a class of models (or what makes one) into the table."""

    def enter(make: Any) -> Any:
        TABLE.append(Row(name, make, call, change, **more))
        return make

    return enter


class Block(nn.Module):
    """Saves several times what it hands on, so that recomputing it frees something."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Trunk(nn.Module):
    """Blocks and a head. `along` is what a row adds between the blocks, `begin` what it does before them."""

    made_of: type[nn.Module] = Block

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.made_of() for _ in range(count))
        self.head = nn.Linear(WIDTH, 4)

    def begin(self) -> None:
        pass

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> Any:
        self.begin()
        for n, block in enumerate(self.blocks):
            x = self.along(block(x), n)
        return self.head(x)


class Long(Trunk):
    """So many blocks that a limit for it leaves room for steps that take twice the bytes."""

    def __init__(self) -> None:
        super().__init__(10)


# -- arguments


class ByKeyword(Trunk):
    def forward(self, x: torch.Tensor, mask: Any = None, bias: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x if mask is None else x * mask.sigmoid()
            x = x if bias is None else x + bias.sigmoid()
        return self.head(x)


row(
    "the same tensors under other keywords", call=lambda n: ((drawn(n),), {("mask", "bias")[n >= 2]: drawn(n, of=1)})
)(ByKeyword)  # fmt: skip
row("an argument that is None at first", call=lambda n: ((drawn(n),), {"bias": drawn(n, of=1)} if n >= 2 else {}))(
    ByKeyword
)
row("keywords in another order", call=lambda n: (
    (drawn(n),), dict(list({"mask": drawn(n, of=1), "bias": drawn(n, of=2)}.items())[:: -1 if n >= 2 else 1])
))(ByKeyword)  # fmt: skip


def nested(n: int) -> Call:
    a, b, c = (drawn(n, of=k) for k in (1, 2, 3))
    return (drawn(n), [a, b], [c]) if n < 2 else (drawn(n), [a], [b, c]), {}


@row("arguments nested otherwise", call=nested)
class Nested(Trunk):
    def forward(self, x: torch.Tensor, added: list[torch.Tensor], factors: list[torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            for part in added:
                x = x + part.tanh()
            for part in factors:
                x = x * part.sigmoid()
        return self.head(x)


@row("an argument that is a dict of other keys", call=lambda n: ((drawn(n), {("a", "b")[n >= 2]: drawn(n, of=1)}), {}))
class OfDict(Trunk):
    def forward(self, x: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x * given["a"].sigmoid() if "a" in given else x + given["b"]
        return self.head(x)


class Power:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Power()"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.factor)


@row("callables among the arguments that look alike", call=lambda n: ((drawn(n), Power(1.0 + n // 2)), {}))
@row(
    "lambdas among the arguments", call=lambda n: ((drawn(n), (lambda x: x.sin()) if n < 2 else lambda x: x.cos()), {})
)
class Called(Trunk):
    def forward(self, x: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        for block in self.blocks:
            x = act(block(x))
        return self.head(x)


@row("a float argument", call=lambda n: ((drawn(n),), {"scale": 0.9 - 0.1 * n}))
@row("a number of NumPy as argument", call=lambda n: ((drawn(n),), {"scale": numpy.float32(0.9 - 0.1 * n)}))
@row("a number that is a tensor as argument", call=lambda n: ((drawn(n),), {"scale": torch.tensor(0.9 - 0.1 * n)}))
@row("a number as argument that is a float, then an int", call=lambda n: ((drawn(n),), {"scale": (1.0, 2)[n % 2]}))
class Scaled(Trunk):
    def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(block(x) * scale)
        return self.head(x)


@row("an int flag", call=lambda n: ((drawn(n), n % 3), {}))
@row("a bool flag", call=lambda n: ((drawn(n), n >= 2), {}))
class Flagged(Trunk):
    def forward(self, x: torch.Tensor, flag: int) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if flag:
                x = torch.sin(x * flag)
        return self.head(x)


@row("a string", call=lambda n: ((drawn(n),), {"task": "sine" if n < 2 else "tanh"}))
class Tasks(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"sine": nn.Linear(WIDTH, 4), "tanh": nn.Linear(WIDTH, 6)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(block(x)) if task == "sine" else torch.tanh(block(x))
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


@row("a buffer that counts and is read as a number")
class CountingBuffer(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def begin(self) -> None:
        self.step += 1

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * (float(self.step) / 3))


class CountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return torch.sin(super().forward(x) * (1 + self.step.item() / 3))


@row("a buffer of each block that counts and is read as a number")
class CountingBlocks(Trunk):
    made_of = CountingBlock


def another_table(net: Any, n: int) -> None:
    if n >= 2:
        net.table = drawn(n, *((1, WIDTH), (LENGTH, WIDTH))[n % 2])


@row("a buffer replaced by one of another shape", another_table)
class TableOf(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * self.table.sigmoid()


@row("a count in a dict")
class CountInDict(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"steps": 0}

    def begin(self) -> None:
        self.counts["steps"] += 1

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * self.counts["steps"])


@row("a counter attribute")
class CounterAttribute(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

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


@row("what was computed for nothing is needed", lambda net, n: setattr(net, "needed", n >= 2))
class ForNothing(Trunk):
    """As a head whose output enters the loss from some step on."""

    needed = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        aside = torch.tanh(x * 2).sigmoid()
        return x + aside if self.needed and n == 1 else x


@row("a counter attribute of each block")
class CallsBlocks(Trunk):
    made_of = CallsBlock

    def __init__(self) -> None:
        super().__init__(6)


row("a counter attribute of each part of an nn.Sequential")(lambda: nn.Sequential(*[CallsBlock() for _ in range(5)]))


@row("a counter attribute whose threshold changes the course")
class Threshold(CounterAttribute):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x) if self.count <= 3 else x.sigmoid()


@row("a counter that counts between blocks")
class CountsAlong(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.seen += 1
        return torch.sin(x * (1 + self.seen / 10))


@row("a list that grows")
class Grows(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.history.append(0.1 * n)
        return torch.sin(x * (1 + sum(self.history)))


@row("a list of what was computed grows")
class Means(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.means.append(x.detach().abs().mean().item())
        return x / (1 + self.means[-1])


@row("a list of tensors of former steps grows")
class Queue(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.former: list[torch.Tensor] = []

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if n == 1:
            x = x + sum((part * 0.1 for part in self.former), torch.zeros(()))
            self.former.append(x.detach().mean(0))
        return x


@row("running averages that the forward replaces")
class Averages(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
        return x / self.average


@row("running averages that the forward changes in place")
class AveragesInPlace(Averages):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x / self.average.clone()
        self.average.lerp_(x.detach().abs().mean(0), 0.1)
        return y


@row("a running average in an attribute that is no buffer")
class AverageOfNoBuffer(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.ones(WIDTH)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x / self.average.clone()
        self.average.lerp_(x.detach().abs().mean(0), 0.1)
        return y


# -- what lies outside of the model

SCALE = 1.0
SCALE_HERE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE_HERE", default=1.0)


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


@row("a global", lambda net, n: PATCH.setattr(HERE, "SCALE", 1.0 + n // 2))
class Global(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * SCALE)


@row(
    "a setting in another module's namespace",
    lambda net, n: PATCH.setattr(F, "rotoff_scale", 1.0 + n // 2, raising=False),
)
class OtherNamespace(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * getattr(F, "rotoff_scale", 1.0))


def with_cell() -> nn.Module:
    scale = 1.0

    def act(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * scale)

    def tell(to: float) -> None:
        nonlocal scale
        scale = to

    class OfCell(Trunk):
        def __init__(self) -> None:
            super().__init__()
            self.tell = tell

        def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return act(x)

    return OfCell()


row("a closure's cell", lambda net, n: net.tell(1.0 + n // 2))(with_cell)


@row("a context variable", lambda net, n: SCALE_HERE.set(1.0 + n // 2))
class ContextVariable(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * SCALE_HERE.get())


@row("an environment variable", lambda net, n: PATCH.setenv("SCALE_OF_TESTS", str(1 + n // 2)))
class Environment(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * float(os.environ.get("SCALE_OF_TESTS", "1")))


@row("a function of the namespace replaced", lambda net, n: n == 2 and PATCH.setattr(HERE, "activation", torch.tanh))
class Activation(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return activation(x)


@row("a function of torch replaced", lambda net, n: n == 2 and PATCH.setattr(F, "softsign", torch.tanh))
class OfTorch(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return F.softsign(x)


def method_replaced(net: Any, n: int) -> None:
    if n == 2:
        for block in net.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: 0.5 * torch.sin(inner(x))


row("the forward of blocks replaced", method_replaced)(Trunk)


def along_replaced(net: Any, n: int) -> None:
    if n == 2:
        net.along = lambda x, n: torch.sin(x * (n + 1))


row("a method of the model replaced", along_replaced)(Trunk)


def class_method_replaced(net: Any, n: int) -> None:
    if n == 2:
        inner = Block.forward
        PATCH.setattr(Block, "forward", lambda self, x: torch.sin(inner(self, x)))


row("a method of a class replaced", class_method_replaced)(Trunk)


class ActBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act: Any = torch.sin
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.act(x * self.scale))


class ActBlocks(Trunk):
    made_of = ActBlock


def of_blocks(name: str, value: Callable[[int], Any]) -> Callable[[Any, int], object]:
    def change(net: Any, n: int) -> None:
        for block in net.blocks:
            setattr(block, name, value(n))

    return change


row("a lambda replaced", of_blocks("act", lambda n: (lambda x: x.sin()) if n < 2 else (lambda x: x.cos())))(ActBlocks)
row(
    "a functools.partial of another number",
    of_blocks("act", lambda n: functools.partial(torch.mul, other=1.0 + n // 2)),
)(ActBlocks)
row("a float attribute in each step another", of_blocks("scale", lambda n: 1.0 - 0.1 * n))(ActBlocks)


@dataclass
class Config:
    gain: float = 1.0
    squared: bool = False


def config_changed(net: Any, n: int) -> None:
    if n == 2:
        net.config = replace(net.config, gain=2.0)
    if n == 3:
        net.config.squared = True


@row("a dataclass of settings", config_changed)
class Configured(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        x = torch.sin(x * self.config.gain)
        return x.square() if self.config.squared else x


def array_changed(net: Any, n: int) -> None:
    net.box.array[:] = 1.0 + n // 2


@row("an array changed in place", array_changed)
class Boxed(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.box = SimpleNamespace(array=numpy.ones(4))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * float(self.box.array[n]))


def iterator_again(net: Any) -> None:
    net.it = iter([1.0, 0.5, 2.0, 1.5, 3.0])


@row("an iterator that each forward takes from", again=iterator_again)
class Iterates(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        iterator_again(self)

    def begin(self) -> None:
        self.scale = next(self.it, 7.0)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * self.scale)


@row("an iterator that each block takes from", again=lambda net: setattr(net, "it", itertools.count(1)))
class Counts(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.it: Iterator[int] = itertools.count(1)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * (1 + next(self.it) / 10))


def scales() -> Iterator[float]:
    for n in itertools.count():
        yield 1.0 + n / 10


@row("a generator function's generator that each block takes from", again=lambda net: setattr(net, "it", scales()))
class Generates(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.it = scales()  # type: ignore[assignment]


# -- modules and parameters that change


def swapped(net: Any, n: int) -> None:
    if n == 2:
        torch.manual_seed(5)
        net.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


row("a submodule swapped for another", swapped, stages=8)(Trunk)


def reordered(net: Any, n: int) -> None:
    if n == 2:
        net.blocks = nn.ModuleList([net.blocks[k] for k in (2, 0, 3, 1)])


row("a list of modules put in another order", reordered)(Trunk)


@row("modules run in another order", lambda net, n: setattr(net, "order", [(k + n) % 4 for k in range(4)]))
class Ordered(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in self.order:
            x = self.blocks[k](x)
        return self.head(x)


row("parts of an nn.Sequential put in another order", lambda net, n: n == 2 and (
    net.__setitem__(1, (parts := list(net))[3]), net.__setitem__(3, parts[1])
))(lambda: nn.Sequential(*[Block() for _ in range(5)]))  # fmt: skip


def frozen(net: Any, n: int) -> None:
    for block in net.blocks[:2]:
        block.requires_grad_(n < 2)


row("a part frozen", frozen)(Trunk)
row("a part thawed", lambda net, n: [block.requires_grad_(n >= 2) for block in net.blocks[:2]], room=0.6)(Trunk)
row("a bias frozen", lambda net, n: net.blocks[1].up.bias.requires_grad_(n % 2 == 0))(Trunk)


@row("a tied weight")
class Tied(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


def untied(net: Any, n: int) -> None:
    if n == 2:
        net.blocks[2].up.weight = nn.Parameter(net.blocks[0].up.weight.detach().clone())


row("a tied weight untied", untied)(Tied)


def parameter_replaced(net: Any, n: int) -> None:
    if n >= 2:
        net.blocks[1].up.weight = nn.Parameter(0.1 * drawn(n, 4 * WIDTH, WIDTH))


row("a parameter replaced", parameter_replaced)(Trunk)


def data_replaced(net: Any, n: int) -> None:
    if n == 2:
        net.blocks[1].up.weight.data = 0.1 * drawn(n, 4 * WIDTH, WIDTH)


row("a parameter's data replaced", data_replaced)(Trunk)


def to_double(net: Any, n: int) -> None:
    if n == 2:
        net.double()


row(
    "model.double() between steps",
    to_double,
    call=lambda n: ((drawn(n).double() if n >= 2 else drawn(n),), {}),
    room=0.8,
    stages=8,
)(Long)


def to_double_first(net: Any, n: int) -> None:
    net.double() if n < 2 else net.float()


@row(
    "model.float() after model.double()",
    to_double_first,
    call=lambda n: ((drawn(n).double() if n < 2 else drawn(n),), {}),
)
class DoubleAtFirst(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.double()


@row(
    "the default dtype changed",
    lambda net, n: torch.set_default_dtype(torch.float32 if n < 2 else torch.float64),
    room=0.7,
)
class DefaultType(Long):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x.double() + torch.full((WIDTH,), 0.1)).float()


def in_double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    return Trunk()


row("another default dtype throughout", call=lambda n: ((drawn(n).double(),), {}))(in_double)


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


def weight_norm_added(net: Any, n: int) -> None:
    if n == 2:
        nn.utils.parametrizations.weight_norm(net.blocks[1].up)


row("weight norm added", weight_norm_added, room=0.5)(Trunk)


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


class Autocast(Long):
    low = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
                x = block(x).float()
        return self.head(x)


row("autocast inside the forward", lambda net, n: setattr(net, "low", True), room=0.6)(Autocast)
row("autocast inside the forward turned on", lambda net, n: setattr(net, "low", n >= 3), room=0.6)(Autocast)


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


class LongPartlyLow(Long):
    made_of = PartlyLow


row("autocast inside the forward turned off", step=under_autocast, room=0.8)(LongPartlyLow)


class Switched(Trunk):
    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = self.way(block, x) if n == 1 else block(x)
        return self.head(x)

    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@row("a part without gradients")
@row("a part without gradients, turned on and off", lambda net, n: setattr(net, "on", n % 2 == 0), room=0.5)
class NoGrad(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.on):
            y = block(x)
        return x + y


@row("a detached part")
@row("a part detached, then not", lambda net, n: setattr(net, "on", n < 2), room=0.5)
class Detached(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        return x + (y.detach() if self.on else y)


@row("torch.utils.checkpoint inside the model")
@row("torch.utils.checkpoint turned off", lambda net, n: setattr(net, "on", n < 2), room=0.5)
class Checkpointed(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.on else block(x)


@row("torch.utils.checkpoint inside the model, the reentrant one")
class Reentrant(Switched):
    def way(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=True)


@row("an einsum of another equation", lambda net, n: setattr(net, "equation", ("ij,kj->ik", "ij,jk->ik")[n >= 2]))
class Einsum(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.equation = "ij,kj->ik"
        self.matrix = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(torch.einsum(self.equation, x, self.matrix))


# -- courses that data choose


@row("a branch on data", call=lambda n: ((drawn(n) + (1, -1)[n % 2],), {}))
class Branch(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = torch.sin(x)
        return self.head(x)


class BranchBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.mean() > 0 else torch.sin(super().forward(x))


@row("a branch on data in each block", call=lambda n: ((drawn(n) + (1, -1)[n % 2],), {}))
class Branches(Trunk):
    made_of = BranchBlock


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


@row("routing to one expert", call=lambda n: ((3 * drawn(n),), {}), room=0.6, stages=8)
class Routed(Trunk):
    made_of = Experts


@row("routing in the model's own forward", call=lambda n: ((3 * drawn(n),), {}), room=0.6)
class RoutedHere(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.blocks[1], self.blocks[2]
        x = self.blocks[0](x)
        positive = x.mean(1) > 0
        y = torch.zeros_like(x)
        y = y.index_add(0, positive.nonzero()[:, 0], left(x[positive]))
        y = y.index_add(0, (~positive).nonzero()[:, 0], right(x[~positive]))
        return self.head(self.blocks[3](x + y))


@row("sizes that data choose, by masked_select", room=0.6)
class Selected(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x + torch.masked_select(x, x > 0).sin().mean()


@row("sizes that data choose, by a mask as index", room=0.6)
class Indexed(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = x[x.mean(1) > -0.2]
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


@row(".item() as a factor")
class Item(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x * (1 + x.detach().abs().max().item()))


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


@row("an error that the forward catches", call=lambda n: ((drawn(n) + (0, 100)[n % 2],), {}))
class Caught(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        try:
            return self.strict(x)
        except ValueError:
            return torch.tanh(x)

    def strict(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        if x.detach().abs().max() > 50:
            raise ValueError("too large")
        return y


@row("an error of torch that the forward catches", call=lambda n: ((drawn(n, LENGTH - 4 * (n % 2), WIDTH),), {}))
class CaughtOfTorch(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(LENGTH, WIDTH))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        try:
            return torch.sin(x * self.table)
        except RuntimeError:
            return torch.tanh(x)


# -- chance


def large(n: int) -> Call:
    """So large that the random states that replays keep weigh little."""
    return (drawn(n, 4 * LENGTH, WIDTH),), {}


@row("dropout", call=large)
@row("dropout of another rate", lambda net, n: [setattr(d, "p", 0.1 * (n + 1)) for d in net.drops], call=large)
@row("dropout in eval()", lambda net, n: [d.train(n < 3) for d in net.drops], call=large)
@row("parts in train() that were in eval()", lambda net, n: [d.train(n >= 3) for d in net.drops], call=large, room=0.8)
class Dropout(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(0.3) for _ in range(4))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.drops[n](x)


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


class Masking(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.from_numpy((numpy.random.random(x.shape) > 0.3).astype(numpy.float32))
        return super().forward(x)


row("inputs masked by NumPy")(Masking)


def factor_by(chance: Callable[[], float]) -> type[Trunk]:
    class Factor(Trunk):
        def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.sin(x * (0.5 + chance()))

    return Factor


row("a factor drawn by Python")(factor_by(random.random))
row("a factor drawn by NumPy")(factor_by(lambda: numpy.random.random()))
row("a factor drawn by torch")(factor_by(lambda: torch.rand(()).item()))

OWN_RANDOM = random.Random(3)
row("a factor drawn by a random.Random of its own", again=lambda net: OWN_RANDOM.seed(3))(
    lambda: (OWN_RANDOM.seed(3), factor_by(OWN_RANDOM.random)())[1]
)


@row("torch.manual_seed inside the forward")
class Seeds(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        torch.manual_seed(n)
        return F.dropout(x, 0.3)


@row("torch.manual_seed of a count inside the forward")
class SeedsOfCount(CounterAttribute):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        torch.manual_seed(self.count)
        return F.dropout(x, 0.3)


@row("a torch.Generator of the model's own", again=lambda net: net.chance.manual_seed(4))
class OwnGenerator(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(4)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.chance)


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


row("a forward hook added", hooked("register_forward_hook", halves), room=0.8)(Long)
row("a forward hook added and removed", hooked("register_forward_hook", halves, 1, 3), room=0.8)(Long)
row(
    "a forward pre-hook added",
    hooked("register_forward_pre_hook", lambda module, args: (torch.sin(args[0]),)),
    room=0.8,
)(Long)
row("a full backward hook added", hooked("register_full_backward_hook", halves_gradients), room=0.8)(Long)
row("a full backward hook from the first step", hooked(
    "register_full_backward_hook", halves_gradients, 0
), room=0.8)(Long)  # fmt: skip
row(
    "a full backward pre-hook added", hooked("register_full_backward_pre_hook", lambda module, grad: (0.5 * grad[0],)), room=0.8
)(Long)  # fmt: skip


def counting_hook(net: Any, n: int) -> None:
    if n == 0:
        net.calls = 0

        def count(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            net.calls += 1
            return torch.sin(output * (1 + net.calls / 10))

        for block in net.blocks:
            block.register_forward_hook(count)


row("a forward hook that counts", counting_hook)(Trunk)


@row("a hook on a tensor inside the forward")
class TensorHook(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: 0.5 * grad)
        return torch.sin(x)


@row("a hook on a tensor inside the forward, of another factor", lambda net, n: setattr(net, "factor", 1.0 - 0.2 * n))
class TensorHookOf(Trunk):
    factor = 1.0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        factor = self.factor
        if x.requires_grad:
            x.register_hook(lambda grad: factor * grad)
        return torch.sin(x)


def with_parameter_hook(net: Any, n: int) -> None:
    if n == 2:
        net.blocks[1].up.weight.register_hook(lambda grad: 0.5 * grad)


row("a hook on a parameter added", with_parameter_hook)(Trunk)


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


@row(
    "outputs of another structure",
    lambda net, n: setattr(net, "kind", ("one", "tuple", "dict", "named", "one")[n]),
    room=0.6,
)
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


@row("another number of iterations", lambda net, n: setattr(net, "times", (6, 5, 3, 6, 4)[n]))
class Recurrent(Trunk):
    times = 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.blocks[0](x)
        return self.head(x)


@row("a recurrence over the input's length", call=lambda n: ((drawn(n, 6 - n, 8, WIDTH),), {}))
class OverLength(Trunk):
    def __init__(self) -> None:
        super().__init__(1)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[1], WIDTH)
        for part in x:
            h = self.blocks[0](self.cell(part, h))
        return self.head(h)


class Skips(Trunk):
    skip = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        y = self.blocks[2](second) + second
        y = self.blocks[3](y)
        return self.head(y + first if self.skip else y)


row("a long skip connection disabled", lambda net, n: setattr(net, "skip", n < 2))(Skips)
row("a long skip connection enabled", lambda net, n: setattr(net, "skip", n >= 2), room=0.6)(Skips)


# -- autograd's own


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square() * 0.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


class Holds(torch.autograd.Function):
    """Keeps its input past all hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x.square() * 0.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.x


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


def applied(function: Any) -> type[Trunk]:
    class Applies(Trunk):
        def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return function.apply(torch.tanh(x))

    return Applies


row("a function of autograd that saves")(applied(Square))
row("a function of autograd that holds its input on ctx")(applied(Holds))
row("a function of autograd whose number changes", lambda net, n: PATCH.setattr(Clipped, "level", 1.0 + n // 2))(
    applied(Clipped)
)


def with_ctx_argument() -> type[Trunk]:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad * ctx.scale, None

    class Applies(Trunk):
        scale = 1.0

        def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return Scale.apply(torch.sin(x), self.scale * (n + 1))

    return Applies


row("a function of autograd given another number", lambda net, n: setattr(net, "scale", 1.0 + n / 10))(
    with_ctx_argument()
)


@row("a forward that differentiates", may_refuse="differentiates")
class Differentiates(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if n != 1:
            return x
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(z.sin().sum(), z)
        return x + 0.1 * gradient


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


@row("what was computed changed in place")
class InPlace(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 2
        y += x
        y.mul_(0.3)
        return y.relu_()


@row("what was computed changed in place, in some steps", lambda net, n: setattr(net, "on", n >= 2))
class InPlaceSometimes(Trunk):
    on = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        if self.on:
            y += 0.5
        return y * 0.7 if self.on else y.relu_()


@row("a skip connection added in place")
class InPlaceSkip(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = 0.3 * block(x)
            y += x
            x = y
        return self.head(x)


@row("a skip connection changed in place")
class SkipInPlace(Trunk):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](x))
        h += torch.tanh(self.blocks[2](h.clone()))
        return self.head(self.blocks[3](h))


@row("a view changed in place", lambda net, n: setattr(net, "width", 4 + n))
class View(Trunk):
    width = 4

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 1.5
        y[:, : self.width].mul_(0.5)
        y.t()[0].add_(1.0)
        return y


@row("scatter_ into what was computed")
class Scatter(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        order = x.detach().argsort(1)
        return torch.zeros_like(x).scatter_(1, order, torch.sin(x)) + x


@row("index_put_ into what was computed", lambda net, n: setattr(net, "rows", [n, n + 1]))
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


@row("a table made in the first forward")
class Rotary(Trunk):
    def __init__(self) -> None:
        super().__init__(8)
        self.cache: Any = None

    def begin(self) -> None:
        if self.cache is None:
            self.cache = torch.outer(torch.arange(LENGTH, dtype=torch.float32), torch.linspace(1, 0.1, WIDTH)).cos()

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * self.cache[: len(x)]


@row("a table that grows", call=lambda n: ((drawn(n, (10, 12, 10, 16, 9)[n], WIDTH),), {}), room=0.7, stages=8)
class GrowingTable(Rotary):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or len(self.cache) < len(x):
            self.cache = torch.outer(torch.arange(len(x), dtype=torch.float32), torch.linspace(1, 0.1, WIDTH)).cos()
        for n, block in enumerate(self.blocks):
            x = self.along(block(x), n)
        return self.head(x)


@row("a dict of tables by length", call=lambda n: ((drawn(n, (16, 12, 16, 8, 12)[n], WIDTH),), {}))
class Tables(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.tables: OrderedDict[int, torch.Tensor] = OrderedDict()

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(0, 1, len(x))[:, None]
        return torch.sin(x + self.tables[len(x)])


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


def accumulated(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    total = torch.zeros(())
    for part in call[0][0].chunk(2):
        loss = error_of(run(part)) / 2
        loss.backward()
        total = total + loss.detach()
    return total


row("two forwards before one backward", step=two_forwards)(Trunk)
row("two forwards before one backward, that count", step=two_forwards)(CallsBlocks)
row("two forwards before two backwards", step=crossed, call=large)(Dropout)
row("two forwards before two backwards, the global between them", step=lambda run, net, call, n: between(run, call))(
    Global
)
row("gradients accumulated", step=accumulated, call=lambda n: ((drawn(n),), {}))(Trunk)


def between(run: nn.Module, call: Call) -> torch.Tensor:
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


class FirstOfAll(Trunk):
    """Its first layer saves the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


class AddsAtFirst(Trunk):
    """Saves nothing of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 1.0)


row("the batch changed in place before the backward", step=changed_before_backward(lambda net, call: call[0][0].zero_()),
    raises=BY_OTHERS)(FirstOfAll)  # fmt: skip
row("a batch that nothing saves changed in place before the backward", step=changed_before_backward(
    lambda net, call: call[0][0].zero_()
), may_refuse=BY_OTHERS)(AddsAtFirst)  # fmt: skip
row("a weight changed in place before the backward", step=changed_before_backward(
    lambda net, call: net.blocks[1].up.weight.mul_(0.5)
), raises=BY_OTHERS)(Trunk)  # fmt: skip
row("a bias changed in place before the backward", step=changed_before_backward(
    lambda net, call: net.blocks[1].up.bias.add_(1.0)
), may_refuse=rf"{BY_OTHERS}|bias")(Trunk)  # fmt: skip
row("a buffer changed in place before the backward", step=changed_before_backward(
    lambda net, call: net.step.add_(3.0)
))(CountingBuffer)  # fmt: skip
row("an attribute changed before the backward", step=changed_before_backward(
    lambda net, call: setattr(net, "count", net.count + 3)
))(CounterAttribute)  # fmt: skip
row("parts put in eval() before the backward", step=changed_before_backward(lambda net, call: net.eval(), (0, 2, 4)), call=large,
    change=lambda net, n: net.train())(Dropout)  # fmt: skip


def twice(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=n >= 2, allow_unused=True)
    total = loss + (sum(g.square().sum() for g in gradients) if n >= 2 else 0)
    if n >= 2:
        total.backward()
    return total


row("a double backward", step=twice, refused=r"differentiate twice|create_graph")(Trunk)


def again_backward(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward(retain_graph=True)
    loss.sin().backward(retain_graph=n > 2)
    if n > 2:
        loss.cos().backward()
    return loss


row("a second and a third backward through the same graph", step=again_backward)(Trunk)
row("a second backward through batch norm and dropout", step=again_backward, call=large)(Dropout)


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


row("a backward for each of two losses", step=gradient_of_each)(Trunk)


def apart(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    one, other = (result.square().mean() for result in run(*call[0]))
    (one if n % 2 else other).backward()
    (other if n % 2 else one).backward()
    return one + other


@row("a backward for each of two towers", step=apart)
class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Trunk(3), Trunk(3)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


def updated_between(first: int) -> Any:
    def step(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
        losses = [result.square().mean() for result in run(*call[0])]
        losses[first].backward()
        with torch.no_grad():
            net.towers[first].head.weight.mul_(0.9)
        losses[1 - first].backward()
        return losses[0] + losses[1]

    return step


row("the last tower updated before the backward of the first", step=updated_between(1))(Towers)
row("the first tower updated before the backward of the last", step=updated_between(0), refused="changed in place")(
    Towers
)


def left(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    if n != 2:
        loss.backward()
    return loss


row("a forward that no backward follows", step=left)(CallsBlocks)


@row("an error that the forward raises in a step", lambda net, n: setattr(net, "fails", n == 2), raises="no such step")
class Raises(CallsBlocks):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            x = block(x)
            if n == 2 and self.fails:
                raise RuntimeError("no such step")
        return self.head(x)


row("AdamW, a factor in each step another", of_blocks("scale", lambda n: 1.0 - 0.1 * n), adam=True)(ActBlocks)
row(
    "AdamW, thawed parts",
    lambda net, n: [block.requires_grad_(n >= 2) for block in net.blocks[:2]],
    room=0.6,
    adam=True,
    call=large,
)(Dropout)


if __name__ == "__main__":
    os.environ["ROTOFF_CACHE"] = "off"
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    print_table(r for r in TABLE if not asked or any(part in r.name for part in asked))
