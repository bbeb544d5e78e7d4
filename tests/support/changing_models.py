"""Models whose behaviour changes between steps, each with the change: rows of the table in test_changing_models.py. One
of each kind: what a tape notes, and how the next step may differ from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from models import Does
from step_by_step import Call, error_of
from torch import nn
from torch.nn import functional as F
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
    row,
    runs,
    sets,
    step_with,
)

# -- arguments and results


Sizes = along(lambda net, x, n: torch.sin(x * (1 + len(x) / 100) + x.stride(0) / 10))
row("a batch of other sizes", call=lambda n: ((drawn(n, LENGTH - 2 * n, WIDTH),), {}))(Sizes)
row(
    "a batch that lies otherwise",
    call=lambda n: ((drawn(n).t().contiguous().t() if n % 2 else drawn(n),), {}),
    room=0.6,
)(Sizes)


@runs(
    "a tensor of the graph in an attribute, in the loss",
    step=step_with(
        after=lambda net, *_: setattr(net, "penalty", None),
        loss=lambda run, net, call, n: error_of(run(*call[0])) + 0.1 * net.penalty,
    ),
    room=0.6,
    has={"penalty": lambda: None},
)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.penalty = torch.zeros(())
    for block in net.blocks:
        x = block(x)
        net.penalty = net.penalty + x.square().mean()
    return net.head(x)


class Hidden(Trunk):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = [self.blocks[0](x)]
        for block in self.blocks[1:]:
            hidden.append(block(hidden[-1]))
        return [self.head(hidden[-1]), *hidden]


row(
    "a loss of another part of the outputs",
    step=step_with(loss=lambda run, net, call, n: error_of(run(*call[0])[: 1 + n])),
    room=0.6,
)(Hidden)


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


def another_table(net: Any, n: int) -> None:
    if n >= 2:
        net.table = drawn(n, *((1, WIDTH), (LENGTH, WIDTH))[n % 2])


def buffer(*shape: int) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.ones(shape))


row("a buffer replaced by one of another shape", another_table)(
    along(lambda net, x, n: x * net.table.sigmoid(), table=buffer(WIDTH))
)


@adds("a buffer written through its data", has={"average": buffer(WIDTH)})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * net.average.clone()
    net.average.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return y


row("a buffer that a call changes unannounced")(
    along(
        lambda net, x, n: x + F.embedding(torch.arange(LENGTH), net.table, max_norm=0.5),
        table=lambda: nn.Buffer(torch.randn(LENGTH, WIDTH)),
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
    "the default dtype changed within the forward, and before the backward",
    step=step_with(
        between=lambda net, call, n: torch.set_default_dtype(torch.float64),
        after=lambda net, call, n: torch.set_default_dtype(torch.float32),
    ),
)
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


# -- courses that data choose


@adds("a branch on data", call=lambda n: ((drawn(n) + (1, -1)[n % 2],), {}))
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.sin(x) if x.mean() > 0 else x


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


def spectral() -> nn.Module:
    """Each forward overwrites buffers that it has not read before, and reads them again."""
    net = Trunk()
    for block in net.blocks:
        nn.utils.spectral_norm(block.up)
    return net


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


def one_by_one(losses: Callable[[Any, torch.Tensor], Any], order: Any = lambda n: (0, 1), between: Any = None) -> Any:
    """A step of two losses, whose backwards come in an order; between: is done after each of them."""

    def step(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
        first, second = found = losses(run, call[0][0])
        for k in order(n):
            found[k].backward()
            with torch.no_grad():
                between and between(net)
        return first + second

    return step


def both(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [error_of(run(x)), error_of(run(x.flip(0) * 0.5))]


crossed = one_by_one(both)
crossed_halves = one_by_one(lambda run, x: [error_of(run(x)), error_of(run(x[::2]))], lambda n: (1, 0))
two_forwards = step_with(loss=lambda run, net, call, n: sum(both(run, *call[0])))
row("two forwards before one backward", step=two_forwards)(Trunk)
row("two forwards before two backwards", step=crossed, call=large)(Dropout)
row("two forwards before two backwards, that count in buffers", step=crossed)(Counts)
row("two forwards of other sizes before two backwards, spectral norm", step=crossed_halves, room=0.6)(spectral)
row("an evaluation between steps, that counts", step=evaluates)(Counts)
row("a forward that no backward follows", step=left)(Counts)


@adds(
    "an error that the forward raises in a step",
    sets("fails", lambda n: n == 2),
    raises="no such step",
    has={"fails": bool},
)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    if n == 2 and net.fails:
        raise RuntimeError("no such step")
    return x


BY_OTHERS = r"modified by an inplace operation|modified in.?place|changed in place"
batch_zeroed = step_with(between=lambda net, call, n: n == 2 and call[0][0].zero_())
weight_changed = step_with(between=lambda net, call, n: n == 2 and net.blocks[1].up.weight.mul_(0.5))
bias_changed = step_with(between=lambda net, call, n: n == 2 and net.blocks[1].up.bias.add_(1.0))
buffer_changed = step_with(between=lambda net, call, n: n == 2 and net.step.add_(3.0))
in_eval = step_with(between=lambda net, call, n: net.train(n % 2 == 1))


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


row("a buffer changed in place before the backward", step=buffer_changed)(Counts)
row("a weight changed in place before the backward", step=weight_changed, raises=BY_OTHERS)(Trunk)
row("a bias changed in place before the backward", step=bias_changed, may_refuse=rf"{BY_OTHERS}|bias")(Trunk)
row("parts put in eval() before the backward", lambda net, n: net.train(), large, step=in_eval)(Dropout)


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


def update(p: torch.Tensor) -> None:
    """As soon as its gradient is whole, while values of earlier stages have yet to be made again."""
    with torch.no_grad():
        p -= 0.05 * p.grad
    p.grad = None


updated_in_backward = step_with(
    lambda net, *_: [p.register_post_accumulate_grad_hook(update) for p in net.parameters()]
)
noisy = step_with(lambda net, *_: [p.register_hook(lambda g: g + torch.randn_like(g)) for p in net.parameters()])


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


row(
    "a part frozen between the forward and its backward, or thawed",
    step=step_with(  # as a GAN does with its discriminator; in other steps the other way round
        lambda net, call, n: net.blocks[1:3].requires_grad_(n % 2 == 1) and None,
        lambda net, call, n: net.blocks[1:3].requires_grad_(n % 2 == 0),
        lambda net, *_: net.requires_grad_(),
    ),
    room=0.6,
)(normed)
row("a double backward", step=twice, room=0.95)(Trunk)
row("updates within the backward", step=updated_in_backward)(Tied)
row("gradients to which hooks add noise, as private training does", step=noisy, call=large)(Dropout)
row(  # which are held at once
    "gradients of the input and of all parameters",
    call=lambda n: ((drawn(n).requires_grad_(),), {}),
    step=of_all,
    room=0.95,
)(Trunk)
row("gradients of a result in the middle", step=of_hidden, room=0.6)(Hidden)
row("a second and a third backward through the same graph", step=again_backward, call=large)(Dropout)


class Short(Trunk):
    many = 3


def of_towers(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [result.square().mean() for result in run(x)]


def updated_between(first: int) -> Any:
    return one_by_one(of_towers, lambda n: (first, 1 - first), lambda net: net.towers[first].head.weight.mul_(0.9))


def towers() -> nn.Module:
    return Does(lambda net, x: [tower(x) for tower in net.towers], towers=nn.ModuleList([Short(), Short()]))


row("the first tower updated before the backward of the last", step=updated_between(0), may_refuse="changed in place")(
    towers
)
row("the last tower updated before the backward of the first", step=updated_between(1))(towers)
row("a backward for each of two towers", step=one_by_one(of_towers, lambda n: (1 - n % 2, n % 2)))(towers)


@runs("a gradient by the input inside the forward", room=0.8, may_refuse="differentiates")
def _(net: Any, x: torch.Tensor) -> Any:
    """As models of molecules have, whose forces are a derivative of their energy."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = Trunk.forward(net, x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy, force
