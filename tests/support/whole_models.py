"""Models whose modules run inside of other code (custom Functions, torch.func, compilers, scripts), and parameters that
they change: a part of the table of test_changing_models.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from models import Does, Kept, members
from step_by_step import Call, Row, error_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from trunks import WIDTH, Block, Trunk, adds, along, batch, drawn, large, row, runs, sets, step_with


class Between(Trunk):
    """Has an odd part after each block."""

    part: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ModuleList(type(self).part() for _ in range(self.many))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x + 0.5 * torch.tanh(self.odd[n](x))


def between(part: Callable[[], nn.Module], **more: Any) -> type[Trunk]:
    return type("BetweenBlocks", (Between,), {"part": staticmethod(part), **more})


# -- custom Functions that run modules, as reversible layers and adjoint solvers do


class Reversible(torch.autograd.Function):
    """x + f(x), whose backward solves for x and adds to the ``.grad`` of f's parameters by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.f = f
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            y = torch.cat([a + f(b), b], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        da, db = gradient.chunk(2, -1)
        b = ctx.saved_tensors[0].chunk(2, -1)[1].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.f(b), da)
        return torch.cat([da, db + b.grad], -1), None


class Adjoint(torch.autograd.Function):
    """Three Euler steps of dx/dt = f(x), made again in the backward; the parameters are arguments. own: returns those
    that f reads then; None if they are those that were saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Any, own: Any, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.f, ctx.own = f, own
        ctx.save_for_backward(x, *parameters)
        for _ in range(3):
            x = x + f(x) / 3
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        start, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = first = start.detach().requires_grad_()
            for _ in range(3):
                x = x + ctx.f(x) / 3
            parameters = parameters if ctx.own is None else ctx.own()
            given, *of = torch.autograd.grad(x, [first, *parameters], gradient)
        return given, None, None, *of


class Layer(nn.Module):
    """how: whether the Function gets the module, or a function that calls it, or its parameters, too, and whether it
    asks the module for them again."""

    how = "module"

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH if "adjoint" in self.how else WIDTH // 2
        norm = nn.BatchNorm1d(32) if "norm" in self.how else nn.Identity()
        self.f = nn.Sequential(nn.Linear(width, 32), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.f if "module" in self.how else lambda x: self.f(x)
        if "adjoint" not in self.how:
            return Reversible.apply(x, f)
        return Adjoint.apply(x, f, self.f.parameters if "asked" in self.how else None, *self.f.parameters())


def of(kind: type[Layer], how: str) -> type[Layer]:
    return type("Of", (kind,), {"how": how})


for how in ("module", "function, norm", "adjoint, function, norm", "adjoint, asked, function, norm"):
    row(f"a Function over a module: {how}", call=large)(between(of(Layer, how)))


def handing(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Gives a module that such a Function runs a tensor of the same forward as a parameter."""
    return torch.func.functional_call(net.inner, {"f.0.weight": net.inner.f[0].weight * 2}, (x,))


row("a tensor of the forward handed to a Function's module: a parameter", call=large)(
    between(lambda: Does(handing, inner=Layer()))
)


def at_the_top(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads a parameter within a Function, in the model's own forward."""
    return net.last(Reversible.apply(net.first(x) * 2, lambda x: x @ net.f.weight.T))


row("a Function over a parameter in the model's own forward", may_refuse="inside of Reversible")(
    lambda: Does(at_the_top, first=Block(), last=Trunk(), f=nn.Linear(WIDTH // 2, WIDTH // 2))
)


@torch.library.custom_op("rotoff_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * (0.5 + random.random())


noise.register_fake(torch.empty_like)
noise.register_autograd(
    lambda ctx, gradient: gradient * ctx.factor,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", output / inputs[0]),
)
UNSEEN = [  # what this operator does follows from nothing that it is given
    Row(
        "a registered operator that draws from Python's generator",
        along(lambda net, x, n: noise(torch.tanh(x * random.random()))),
        batch,
    )
]


class Deepening(Trunk):
    """Runs more blocks in some steps, or fewer."""

    depth, many = 4, 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks[: self.depth]):
            x = self.along(torch.tanh(block(x)), n)
        return self.head(x)


def backward_twice(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


deeper, noisy = sets("depth", lambda n: (4, 4, 6, 4, 3)[n]), along(lambda net, x, n: noise(x), Deepening)
UNSEEN += [
    Row("what cannot be made again, off its course", noisy, large, deeper, room=0.6),
    Row("what cannot be made again, in a second backward", noisy, large, step=backward_twice, room=0.6),
]

# -- modules that run mapped, compiled and scripted


row("a branch on data by torch.cond, whose branches are modules", room=1.0)(
    along(
        lambda net, x, n: torch.cond(x.sum() > 0, lambda x: net.odd(x) * 2, lambda x: net.odd(x).tanh(), (x,)),
        odd=lambda: nn.Linear(WIDTH, WIDTH),
    )
)


def mapped(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda one: one.sin())(torch.tanh(net.linear(x))) + net.shift


def mapping(does: Any = mapped) -> nn.Module:
    return Does(does, linear=nn.Linear(WIDTH, WIDTH), shift=nn.Buffer(torch.zeros(WIDTH)))


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")


def recurrent(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Keeps its state, with its graph, for its next call."""
    net.state = 0
    for _ in range(3):
        net.state = x = mapped(net, x + net.state)
    net.state = None
    return x


row(
    "a hook removed before the backward, compiled",
    step=step_with(
        lambda net, *_: [net.odd[0].register_forward_hook(lambda module, args, result: result * 2)],
        lambda net, *_: net.odd[0]._forward_hooks.clear(),
    ),
)(between(compiled))
row(
    "functional_call of the whole model, mapped",
    step=step_with(
        loss=lambda run, net, call, n: error_of(
            torch.func.functional_call(run, {name: p * 1.5 for name, p in run.named_parameters()}, call[0])
        )
    ),
    room=0.95,
)(between(mapping))
row("a mapped cell with a state")(between(lambda: mapping(recurrent)))
row("an ensemble by functional_call within vmap")(between(lambda: members(WIDTH)))


# -- what the forward leaves, and hooks that only autograd sees


def packed(net: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """PyTorch writes the lengths of the padded result unseen."""
    rows = pack_padded_sequence(torch.tanh(x), lengths, batch_first=True, enforce_sorted=False)
    outputs, lengths = pad_packed_sequence(net.cells(rows)[0], batch_first=True)
    return torch.tanh(outputs).sum(1) / lengths[:, None]


def of_lengths(n: int) -> Call:
    longest = (9, 9, 5, 9, 7)[n]
    return (drawn(n, 64, longest, 16).requires_grad_(), longest - torch.arange(64) % (n + 2)), {}


UNSEEN.append(
    Row(
        "packed sequences of other lengths",
        lambda: Does(packed, cells=nn.LSTM(16, 16, batch_first=True)),
        of_lengths,
        room=0.4,
    )
)


@adds("hooks of nodes of the graph", has={"calls": int}, again=lambda net: setattr(net, "calls", 0))
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    x = torch.sin(x) * 1.1

    def count(*_: Any) -> None:
        net.calls += 1

    if x.grad_fn is not None:
        x.grad_fn.register_hook(count)
        x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 1.5,))
        x.grad_fn.register_hook(count).remove()
        x = x if x.grad_fn.name().startswith("Mul") else x * 0
    return x


def of_both(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    result, beside = run(*call[0])
    return result.square().mean() + (beside.x.mean() if beside else 0)


@runs(
    "an object with a tensor of the graph returned, from the third step on",
    sets("odd", lambda n: n > 1),
    step=step_with(loss=of_both),
    room=0.5,
    has={"odd": bool},
)
def _(net: Any, x: torch.Tensor) -> Any:
    for block in net.blocks:
        x = block(x)
    return net.head(x), Kept(x.tanh()) if net.odd else None


# -- parameters that the forward changes, saved-tensor hooks of the model's own


def taught(way: Callable[[Any, torch.Tensor], object]) -> type[Trunk]:
    """Changes a parameter without a gradient in its forward, in one of the ways to write to it."""

    def act(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x * net.mean.clone())
        with torch.no_grad():
            way(net, x)
        return y

    return along(act, mean=lambda: nn.Parameter(torch.ones(WIDTH), requires_grad=False))


for name, way in {
    "by new data": lambda net, x: setattr(net.mean, "data", x.mean(0)),
    "by foreach": lambda net, x: torch._foreach_mul_([net.mean], 0.9),
    "by out=": lambda net, x: torch.mul(net.mean, 0.9, out=net.mean),
}.items():
    row(f"a parameter that the forward changes {name}", may_refuse="changes parameter")(taught(way))


@row("saved-tensor hooks of the model's own", may_refuse="saved-tensor hooks")
class Rounds(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return torch.sin(x)
