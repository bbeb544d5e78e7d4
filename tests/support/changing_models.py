"""Models whose behaviour changes between steps, each with the change: rows of the table in test_changing_models.py. One
of each kind: what a tape notes, and how the next step may differ from it."""

from __future__ import annotations

import contextvars
import os
import random
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import torch
from step_by_step import PATCH, Call, error_of
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from trunks import (
    LENGTH,
    WIDTH,
    Block,
    Long,
    Trunk,
    adds,
    along,
    at,
    drawn,
    large,
    made_of,
    of_blocks,
    row,
    runs,
    sets,
)

HERE = sys.modules[__name__]


# -- arguments and results


Sizes = along(lambda net, x, n: torch.sin(x * (1 + len(x) / 100) + x.stride(0) / 10))
row("a batch of other sizes", call=lambda n: ((drawn(n, LENGTH - 2 * n, WIDTH),), {}))(Sizes)
row(
    "a batch that lies otherwise",
    call=lambda n: ((drawn(n).t().contiguous().t() if n % 2 else drawn(n),), {}),
    room=0.6,
)(Sizes)


@row("more layers by an argument, or fewer", call=lambda n: ((drawn(n),), {"layers": (6, 8, 6, 5, 10)[n]}), room=0.7)
class EarlyExit(Long):
    def forward(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for block in self.blocks[:layers]:
            x = block(x)
        return self.head(x)


def with_penalty(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0])) + 0.1 * net.penalty
    loss.backward()
    net.penalty = None
    return loss


@runs("a tensor of the graph in an attribute, in the loss", step=with_penalty, room=0.6, has={"penalty": lambda: None})
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.penalty = torch.zeros(())
    for block in net.blocks:
        x = block(x)
        net.penalty = net.penalty + x.square().mean()
    return net.head(x)


Named = namedtuple("Named", "y x")


@runs(
    "outputs of another structure",
    sets("kind", lambda n: ("one", "tuple", "dict", "named", "one")[n]),
    room=0.6,
    has={"kind": lambda: "one"},
)
def _(net: Any, x: torch.Tensor) -> Any:
    for block in net.blocks:
        x = block(x)
    y = net.head(x)
    return {"one": y, "tuple": (y, [x]), "dict": {"y": y, "x": x, "n": 3}, "named": Named(y, x)}[net.kind]


def part_of(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    hidden = run(*call[0])
    loss = error_of(hidden[: 1 + n])
    loss.backward()
    return loss


class Hidden(Trunk):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = [self.blocks[0](x)]
        for block in self.blocks[1:]:
            hidden.append(block(hidden[-1]))
        return [self.head(hidden[-1]), *hidden]


row("a loss of another part of the outputs", step=part_of, room=0.6)(Hidden)


@runs("a long skip connection enabled", sets("skip", lambda n: n >= 2), room=0.6, has={"skip": bool})
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    first = net.blocks[0](x)
    second = net.blocks[1](first)
    y = net.blocks[3](net.blocks[2](second) + second)
    return net.head(y + first if net.skip else y)


# -- what the forward counts, sets, changes in place and draws from


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


@adds("a count whose threshold changes the course", has={"count": int})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    """From the third step on, which measuring does not see."""
    net.count += 1
    return torch.sin(x * (3.0 if net.count > 8 else 1.0))


class CallsBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.sin(super().forward(x) * self.calls)


@row("a counter attribute of each block")
class CallsBlocks(Trunk):
    made_of, many = CallsBlock, 6


def another_table(net: Any, n: int) -> None:
    if n >= 2:
        net.table = drawn(n, *((1, WIDTH), (LENGTH, WIDTH))[n % 2])


def buffer(*shape: int) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.ones(shape))


row("a buffer replaced by one of another shape", another_table)(
    along(lambda net, x, n: x * net.table.sigmoid(), table=buffer(WIDTH))
)


@adds("what was computed for nothing is needed", sets("needed", lambda n: n >= 2), has={"needed": bool})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    """As a head whose output enters the loss from some step on."""
    aside = torch.tanh(x * 2).sigmoid()
    return x + aside if net.needed and n == 1 else x


for _name, _write in {
    "through its data": lambda average, mean: average.data.mul_(0.9).add_(mean, alpha=0.1),
    "through a part of unbind": lambda average, mean: average.unbind()[0].lerp_(mean, 0.1),
}.items():

    @adds(f"a buffer written {_name}", has={"average": buffer(2, WIDTH)})
    def _(net: Any, x: torch.Tensor, n: int, write: Any = _write) -> torch.Tensor:
        y = x * net.average[0].clone()
        with torch.no_grad():
            write(net.average, x.detach().mean(0))
        return y


row("a buffer that a call changes unannounced")(
    along(
        lambda net, x, n: x + F.embedding(torch.arange(LENGTH), net.table, max_norm=0.5),
        table=lambda: nn.Buffer(torch.randn(LENGTH, WIDTH)),
    )
)


@adds("a tensor that is no buffer changed in place", has={"mean": lambda: torch.ones(WIDTH)})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * net.mean.clone()
    net.mean.mul_(0.9)
    return y


# -- what lies outside of the model

SCALE = 1.0
SCALE_HERE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE_HERE", default=1.0)
OfGlobal = along(lambda net, x, n: torch.sin(x * SCALE))


def activation(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def changed_outside(net: Any, n: int) -> None:
    """One thing a step."""
    changes: tuple[Callable[[], object], ...] = (
        lambda: PATCH.setattr(HERE, "SCALE", 1.1),
        lambda: PATCH.setattr(HERE, "activation", torch.tanh),
        lambda: PATCH.setattr(F, "softsign", torch.tanh),
        lambda: SCALE_HERE.set(1.4),
        lambda: PATCH.setenv("SCALE_OF_TESTS", "1.5"),
    )
    changes[n]()


row("a global, functions of the namespace and of torch, a context variable, an environment variable", changed_outside)(
    along(
        lambda net, x, n: F.softsign(
            activation(x * SCALE * SCALE_HERE.get() * float(os.environ.get("SCALE_OF_TESTS", "1")))
        )
    )
)


def filled(array: numpy.ndarray, n: int) -> numpy.ndarray:
    array[:] = numpy.sin(numpy.arange(len(array)) * (n + 1.0))
    return array


row("an array filled again after each block")(
    along(
        lambda net, x, n: torch.sin(x + torch.from_numpy(filled(net.room, n))),
        room=lambda: numpy.zeros(WIDTH, dtype=numpy.float32),
    )
)


# -- modules and parameters that change


@runs("modules run in another order", sets("order", lambda n: [(k + n) % 4 for k in range(4)]))
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    for k in getattr(net, "order", range(4)):
        x = net.blocks[k](x)
    return net.head(x)


def thawed_from_the_end(net: nn.Module, n: int) -> None:
    """As in fine-tuning, and frozen again."""
    for k, p in enumerate(net.parameters()):
        p.requires_grad_(k >= (14, 7, 0, 7, 14)[n])


def data_replaced(net: Any) -> None:
    net.blocks[1].up.weight.data = 0.1 * drawn(2, 4 * WIDTH, WIDTH)


def doubled(n: int) -> Call:
    return (drawn(n).double() if n >= 2 else drawn(n),), {}


def normed() -> nn.Module:
    net = Trunk()
    for block in net.blocks:
        block.norm = nn.BatchNorm1d(WIDTH)
    return net


row("a block appended", at(2, lambda net: net.blocks.append(Block())), room=0.8)(Long)
row("parts thawed from the end and frozen again", thawed_from_the_end, room=0.8)(Trunk)
row("a parameter's data replaced", at(2, data_replaced))(Trunk)
row("model.double() between steps", at(2, lambda net: net.double()), doubled, room=0.8, stages=8)(Long)
row("batch norm of some parts in eval()", lambda net, n: [b.train(n < 2) for b in net.blocks[:2]])(normed)


@row("a tied weight")
class Tied(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


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


@row(
    "attention by another kernel",
    of_blocks("backend", lambda n: (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)[n % 2]),
    call=sequences,
    room=0.5,
)
class Attends(Trunk):
    made_of = Attention


def under_autocast(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=n >= 3):
        loss = error_of(run(*call[0]))
    loss.backward()
    return loss


row("autocast around the model turned on", step=under_autocast, room=0.8)(Long)


@adds("autocast inside the forward turned off", step=under_autocast, of=Long, room=0.8)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    """Which may be on around the model."""
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(x.float() @ net.blocks[n].up.weight.T @ net.blocks[n].down.weight.T)


@adds(
    "the default dtype changed",
    lambda net, n: torch.set_default_dtype(torch.float32 if n < 2 else torch.float64),
    of=Long,
    room=0.7,
)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.sin(x.double() + torch.full((WIDTH,), 0.1)).float()


def between_dtypes(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    torch.set_default_dtype(torch.float64)
    loss.backward()
    torch.set_default_dtype(torch.float32)
    return loss


@adds("the default dtype changed within the forward, and before the backward", step=between_dtypes)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    table = torch.linspace(0, 1, x.shape[-1]) / 3
    torch.set_default_dtype(torch.float32)
    return torch.sin(x.double() * table).float() * (torch.linspace(0, 1, x.shape[-1]) / 3)


def without_gradients(net: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(not net.on):
        y = block(x)
    return x + y


def checkpointed(net: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False) if net.on else block(x)


for _name, _on, _way in (
    ("a part without gradients, turned on and off", lambda n: n % 2 == 0, without_gradients),
    ("torch.utils.checkpoint turned off", lambda n: n < 2, checkpointed),
    ("a reentrant checkpoint", bool, lambda net, block, x: checkpoint(block, x, use_reentrant=True)),
):

    @runs(_name, sets("on", _on), room=0.5, has={"on": lambda: True})
    def _(net: Any, x: torch.Tensor, way: Any = _way) -> torch.Tensor:
        for n, block in enumerate(net.blocks):
            x = way(net, block, x) if n == 1 else block(x)
        return net.head(x)


def quantizers() -> nn.Module:
    whole = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
    made = nn.ModuleList(FusedMovingAvgObsFakeQuantize(**whole) for _ in range(4))
    for one in made:
        one.disable_observer()
        one.disable_fake_quant()
    return made


row(
    "fake quantization switched on, whose statistics PyTorch changes uncounted",
    lambda net, n: [
        switch(n >= 1) for one in net.quantizers for switch in (one.enable_observer, one.enable_fake_quant)
    ],
)(along(lambda net, x, n: net.quantizers[n](torch.sin(x)), quantizers=quantizers))


# -- courses that data choose


@adds("a branch on data", call=lambda n: ((drawn(n) + (1, -1)[n % 2],), {}))
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.sin(x) if x.mean() > 0 else x


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


@runs("sizes that data choose, by a mask as index", room=0.6)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.blocks[0](x)
    x = x[x.mean(1) > -0.2]
    for block in net.blocks[1:]:
        x = block(x)
    return net.head(x)


# -- chance


Dropout = along(lambda net, x, n: net.drops[n](x), drops=lambda: nn.ModuleList(nn.Dropout(0.3) for _ in range(4)))
row("dropout in eval()", lambda net, n: [d.train(n < 3) for d in net.drops], call=large)(Dropout)


@runs("layers dropped by chance", of=Long, room=0.7)  # the sample's draws may leave out more than a later step does
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        if random.random() > 0.3:
            x = block(x)
    return net.head(x)


row("factors drawn by torch, Python and NumPy", call=large)(
    along(lambda net, x, n: torch.sin(x * (0.5 + torch.rand(()).item() + random.random() + numpy.random.random())))
)


@adds("chance of its own for each step and block, by manual_seed and fork_rng", call=large, has={"count": int})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    net.count += 1
    torch.manual_seed(net.count)
    with torch.random.fork_rng([]):
        torch.manual_seed(n)
        x = F.dropout(x, 0.3)
    return F.dropout(x, 0.1)


for _name, _generator in {"a torch.Generator": torch.Generator, "torch's own": lambda: torch.default_generator}.items():
    row(f"draws from {_name}", at(0, lambda net: net.generator.manual_seed(5)), large)(
        along(
            lambda net, x, n: x * torch.bernoulli(torch.full_like(x, 0.5), generator=net.generator),
            generator=_generator,
        )
    )


# -- hooks


def hooks_come_and_go(net: Any, n: int) -> None:
    if n == 1:
        halved = lambda module, gradients, _: tuple(None if g is None else 0.5 * g for g in gradients)  # noqa: E731
        net.handles = [block.register_full_backward_hook(halved) for block in net.blocks[1:]]
        net.handles += [b.register_forward_hook(lambda module, args, y: 0.5 * torch.sin(y)) for b in net.blocks[1:]]
        net.handles.append(net.blocks[1].up.weight.register_hook(lambda g: 0.5 * g))
    for handle in net.handles if n == 3 else ():
        handle.remove()


row("hooks of modules and a parameter come and go", hooks_come_and_go, room=0.8)(Long)


# -- in place


@adds("what was computed changed in place, in some steps", sets("on", lambda n: n >= 2), has={"on": bool})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    y = torch.sin(x)
    if net.on:
        y += x
        y.mul_(0.7)
    return y * 0.7 if net.on else y.relu_()


class Wide(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


@runs(
    "residuals added in place, others in each step",
    sets("odd", lambda n: n % 2),
    of=made_of(Wide, Long),
    has={"odd": int},
    stages=8,
)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.blocks[0](x)
    for k, block in enumerate(net.blocks[1:]):
        y = torch.tanh(block(x * 1.0))
        if k % 2 == net.odd:
            x += y
        else:
            x = x + y
    return net.head(x)


for _name, _change in {
    "by a view of a view": lambda whole, view, k: view.t()[k].zero_(),
    "by what is detached": lambda whole, view, k: whole.detach().mul_(0.5),
    "by a mask": lambda whole, view, k: whole.__setitem__(whole.detach() > 0.2, 0.0),
}.items():

    @runs(
        f"an earlier result changed in place, in some steps: {_name}",
        sets("on", lambda n: n % 2 == 1),
        has={"on": bool},
        room=0.3,
    )
    def _(net: Any, x: torch.Tensor, change: Any = _change) -> torch.Tensor:
        """After later blocks have read it."""
        x = net.blocks[0](x)
        view, y = x[:, :8], x * 2.0
        for k, block in enumerate(net.blocks[1:]):
            y = block(y)
            if net.on:
                change(x, view, k)
            y = y + x + view.mean()
        return net.head(y)


@runs("views changed in place and read when their base is needed no more")
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.blocks[0](x)
    rows, column = x.unflatten(0, (-1, 4))[1], x[:, 3]
    rows.add_(1.0)
    y = net.blocks[1](x * 2.0) + x
    column.mul_(0.2)
    y = torch.sin(y + x + rows.mean() + column.mean())
    for block in net.blocks[2:]:
        y = block(y)
    return net.head(y)


@adds("index_put_ into what was computed", sets("rows", lambda n: [n, n + 1]), has={"rows": lambda: [0, 1]})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    y = torch.sin(x)
    y[net.rows] = x[: len(net.rows)] * 0.5
    y[x > 1.5] = 0.0
    return y


@runs("the batch masked in place by the forward, and changed again later", room=0.4)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.rand(len(x)) < 0.3
    x[mask] = 0
    y = x * 2
    for n, block in enumerate(net.blocks):
        y = y + torch.tanh(block(y)) * ~mask[:, None]
        if n == 2:
            x.mul_(0.5)
            y = torch.sin(y + x)
    return net.head(y)


# -- caches


def rotary(length: int) -> torch.Tensor:
    return torch.outer(torch.arange(length, dtype=torch.float32), torch.linspace(1, 0.1, WIDTH)).cos()


@adds(
    "a table that grows",
    call=lambda n: ((drawn(n, (10, 12, 10, 16, 9)[n], WIDTH),), {}),
    of=Long,
    has={"cache": lambda: torch.empty(0)},
    room=0.7,
    stages=8,
)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    if len(net.cache) < len(x):
        net.cache = rotary(len(x))
    return x * net.cache[: len(x)]


@adds(
    "a memory of the step before",
    again=lambda net: setattr(net, "memory", None),
    room=0.8,
    has={"memory": lambda: None},
)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    if n:
        return x
    x = x if net.memory is None else x + 0.5 * net.memory
    net.memory = x.detach()
    return x


def forgets(net: Any) -> None:
    net.memory, net.count = None, 0


OF_THE_GRAPH = {
    "table": lambda: nn.Parameter(0.1 * torch.ones(WIDTH)),
    "count": int,
    "memory": lambda: None,
    "on": bool,
}


@adds("a table made by every second step, and read detached by the others", again=forgets, has=OF_THE_GRAPH, room=0.5)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    if n:
        return x
    net.count += 1
    made = net.memory is None or net.count % 2
    net.memory = torch.softmax(net.table, 0) if made else net.memory.detach()
    return x + net.memory


@adds(
    "a result with its graph that later steps read, too",
    sets("on", lambda n: n > 0),
    again=forgets,
    has=OF_THE_GRAPH,
    room=0.8,
)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    """Plain PyTorch lets it, since an addition saves nothing; it cannot be recorded, so steps go on as they are."""
    if n or not net.on:
        return x
    if net.memory is None:
        net.memory = net.table + 0
    return x + net.memory


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


def crossed_halves(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    (x,), _ = call
    first, second = error_of(run(x)), error_of(run(x[::2]))
    second.backward()
    first.backward()
    return first + second


def spectral() -> nn.Module:
    """Each forward overwrites buffers that it has not read before, and reads them again."""
    net = Trunk()
    for block in net.blocks:
        nn.utils.spectral_norm(block.up)
    return net


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


def left(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    if n != 2:
        loss.backward()
    return loss


row("two forwards before one backward", step=two_forwards)(Trunk)
row("two forwards before two backwards", step=crossed, call=large)(Dropout)
row("two forwards before two backwards, that count in buffers", step=crossed)(Counts)
row("two forwards of other sizes before two backwards, spectral norm", step=crossed_halves, room=0.6)(spectral)
row("two forwards before two backwards, the global between them", step=between)(OfGlobal)
row("an evaluation between steps, that counts", step=evaluates)(CallsBlocks)
row("a forward that no backward follows", step=left)(CallsBlocks)


@adds(
    "an error that the forward raises in a step",
    sets("fails", lambda n: n == 2),
    raises="no such step",
    of=CallsBlocks,
    has={"fails": bool},
)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    if n == 2 and net.fails:
        raise RuntimeError("no such step")
    return x


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
weight_changed = changed_before_backward(lambda net, call: net.blocks[1].up.weight.mul_(0.5))
bias_changed = changed_before_backward(lambda net, call: net.blocks[1].up.bias.add_(1.0))
in_eval = changed_before_backward(lambda net, call: net.eval(), (0, 2, 4))


@runs(
    "the batch changed in place before the backward",
    step=batch_zeroed,
    raises=BY_OTHERS,
    has={"first": lambda: nn.Linear(WIDTH, WIDTH)},
)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    return Trunk.forward(net, net.first(x))


@runs("a batch that nothing saves changed in place before the backward", step=batch_zeroed, may_refuse=BY_OTHERS)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    return Trunk.forward(net, x + 1.0)


row(
    "a buffer changed in place before the backward", step=changed_before_backward(lambda net, call: net.step.add_(3.0))
)(Counts)
row("a weight changed in place before the backward", step=weight_changed, raises=BY_OTHERS)(Trunk)
row("a bias changed in place before the backward", step=bias_changed, may_refuse=rf"{BY_OTHERS}|bias")(Trunk)
row("parts put in eval() before the backward", lambda net, n: net.train(), large, step=in_eval)(Dropout)


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


def accumulated(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    losses = []
    for part in call[0][0].chunk(3):
        losses.append(error_of(run(part)) / 3)
        losses[-1].backward()
    return torch.stack(losses).sum()


def updated_in_backward(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    """Weights change as soon as their gradient is whole, while values of earlier stages have yet to be made again."""

    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            p -= 0.05 * p.grad
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in net.parameters()]
    loss = error_of(run(*call[0]))
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss


def noisy(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    """Noise for each gradient, as private training draws it: between what is made again."""
    hooks = [p.register_hook(lambda g: g + torch.randn_like(g)) for p in net.parameters()]
    loss = error_of(run(*call[0]))
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss


def of_all(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    (x,), _ = call
    loss = error_of(run(x))
    given = torch.autograd.grad(loss, [x, *net.parameters()])
    return torch.stack([loss, *(g.double().sum() for g in given)])


def of_hidden(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    """The gradient of a result in the middle, which the caller asks for in one way after the other."""
    y, *hidden = run(*call[0])
    middle, seen = hidden[1], list[torch.Tensor]()
    if n % 4:
        middle.retain_grad()
    else:
        middle.register_hook(seen.append)
    loss = y.double().mean() + middle.double().sin().mean()
    if n % 4 == 1:
        seen = [g for g in torch.autograd.grad(loss, [middle, *net.parameters()], allow_unused=True) if g is not None]
    else:
        loss.backward(inputs=[middle] if n % 4 == 2 else None)
        seen = seen or [middle.grad]
    return torch.stack([loss, *(g.double().square().sum() for g in seen)])


def thawed_between(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    """As a GAN does with its discriminator; in other steps the other way round."""
    net.blocks[1:3].requires_grad_(n % 2 == 1)
    loss = error_of(run(*call[0]))
    net.blocks[1:3].requires_grad_(n % 2 == 0)
    loss.backward()
    net.requires_grad_()
    return loss


row("a part frozen between the forward and its backward, or thawed", step=thawed_between, room=0.6)(normed)
row("a double backward", step=twice, room=0.95)(Trunk)
row("gradients accumulated over parts of a batch", step=accumulated, call=lambda n: ((drawn(n, 48, WIDTH),), {}))(
    Dropout
)
row("updates within the backward", step=updated_in_backward)(Tied)
row("gradients to which hooks add noise", step=noisy, call=large)(Dropout)
row(  # which are held at once
    "gradients of the input and of all parameters",
    call=lambda n: ((drawn(n).requires_grad_(),), {}),
    step=of_all,
    room=0.95,
)(Trunk)
row("gradients of a result in the middle", step=of_hidden, room=0.6)(Hidden)
row("a second and a third backward through the same graph", step=again_backward, call=large)(Dropout)
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


@row("the first tower updated before the backward of the last", step=updated_between(0), may_refuse="changed in place")
@row("the last tower updated before the backward of the first", step=updated_between(1))
@row("a backward for each of two towers", step=apart)
class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Short(), Short()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [tower(x) for tower in self.towers]


@runs("a gradient by the input inside the forward", room=0.8, may_refuse="differentiates")
def _(net: Any, x: torch.Tensor) -> Any:
    """As models of molecules have, whose forces are a derivative of their energy."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = Trunk.forward(net, x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy, force


row("AdamW, a factor in each step another", sets("scale", lambda n: 1.0 - 0.1 * n), adam=True)(
    along(lambda net, x, n: torch.sin(x * net.scale), scale=lambda: 1.0)
)
