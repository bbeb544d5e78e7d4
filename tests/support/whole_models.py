"""Models whose modules run inside of other code (custom Functions, torch.func, compilers, scripts), and what such
modules read, set, draw and count within the model and outside of it: a part of the table of test_changing_models.py."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from step_by_step import Call, Row, error_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from trunks import LENGTH, WIDTH, Block, Trunk, along, batch, drawn, row, sets


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
    """Three Euler steps of dx/dt = f(x), made again in the backward; the parameters are arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Any, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.f = f
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
            given, *of = torch.autograd.grad(x, [first, *parameters], gradient)
        return given, None, *of


class Layer(nn.Module):
    """how: whether the Function gets the module, or a function that calls it, or its parameters, too."""

    how = "module"

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH if "adjoint" in self.how else WIDTH // 2
        norm = nn.BatchNorm1d(32) if "norm" in self.how else nn.Identity()
        self.f = nn.Sequential(nn.Linear(width, 32), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.f if "module" in self.how else lambda x: self.f(x)
        return Adjoint.apply(x, f, *self.f.parameters()) if "adjoint" in self.how else Reversible.apply(x, f)


def of(kind: type[Layer], how: str) -> type[Layer]:
    return type("Of", (kind,), {"how": how})


HOWS = ("module", "function", "function, norm", "adjoint, module, norm", "adjoint, function, norm")
for how in HOWS:
    row(f"a Function over a module: {how}")(between(of(Layer, how)))


@dataclass
class Box:
    number: int = 0


class Drawing(Layer):
    """Its own code draws from generators of all kinds and counts, beside a Function over a module."""

    what: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self.number, self.seen, self.counted = 0, [], {"calls": 0}
        self.own, self.of_numpy = torch.Generator().manual_seed(0), numpy.random.default_rng(0)
        self.of_python, self.array = random.Random(0), numpy.zeros(1)
        self.box, self.nested = Box(), {"a": [{"b": 0}]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.what())


def counted(layer: Any) -> float:
    layer.number += 1
    layer.seen.append(layer.number)
    layer.counted["calls"] += 1
    layer.array += 1
    return 1 + 0.1 * (layer.number + len(layer.seen) + layer.counted["calls"] + float(layer.array[0]))


def counted_within(layer: Any) -> float:
    layer.box.number += 1
    layer.nested["a"][0]["b"] += 1
    layer.new = getattr(layer, "new", 0) + 1
    return 1 + 0.1 * (layer.box.number + layer.nested["a"][0]["b"] + layer.new)


DRAWN: dict[str, Callable[[Any], Any]] = {
    "draws from Python's and NumPy's generators": lambda layer: 0.5 + random.random() * numpy.random.rand(),
    "draws from generators of its own": lambda layer: layer.of_python.random() + layer.of_numpy.random(),
    "draws from a torch.Generator of its own": lambda layer: 0.5 + torch.rand((), generator=layer.own),
    "counts": counted,
    "counts in objects, and in an attribute that its first call makes": counted_within,
}
for name, what in DRAWN.items():
    row(f"a Function over a module, beside code that {name}")(between(type("Drawing", (Drawing,), {"what": what})))


class AtTheTop(nn.Module):
    """In the model's own forward."""

    reads: Callable[[Any, torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.f = Block(), Trunk(), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(Reversible.apply(x * 2, lambda x: self.reads(x)))


READ: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a module": lambda net, x: net.f(x),
    "a parameter": lambda net, x: nn.functional.linear(x, net.f.weight),
    "its transpose": lambda net, x: x @ net.f.weight.T,
    "its data": lambda net, x: x * net.f.weight.detach().sum(),
}
for name, reads in READ.items():
    row(
        f"a Function over {name} in the model's own forward",
        may_refuse="uses modules or parameters inside of Reversible",
    )(type("Top", (AtTheTop,), {"reads": reads}))


class Counting(nn.Module):
    """Draws from Python's and NumPy's generators, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x * (random.random() + numpy.random.rand() + 0.1 * len(self.seen))


class Switched(Layer):
    """Runs its module through a custom Function while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.f.append(Counting())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.on else x + x.tanh()


class Within(torch.autograd.Function):
    """Calls its module while the layer is on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x + layer.f(x.chunk(2, -1)[0]).repeat(1, 2) if layer.on else x + x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class SwitchedWithin(Switched):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Within.apply(x, self)


def switched_on(net: Any, n: int) -> None:
    for block in net.odd:
        block.on = n in (1, 3, 4)


for kind, how in [*((Switched, how) for how in HOWS), (SwitchedWithin, HOWS[1])]:
    row(f"{kind.__name__}, a Function over a module in some steps: {how}", switched_on, room=0.9)(
        between(of(kind, how), many=8)
    )


class Scaled(Layer):
    """Its scale, and what it has seen, are set by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.steps = 1.0, {"steps": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale * len(self.steps["steps"]))


class Setting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Scaled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner[0].scale *= 0.9
        self.inner[0].steps["steps"].append(1)
        x = self.inner(x)
        self.inner[0].scale *= 0.9
        return x


class Handing(nn.Module):
    """Gives a module that such a Function runs a tensor of the same forward, in an attribute or as a parameter."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Scaled(), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "a parameter":
            made = {"f.0.weight": self.inner.f[0].weight * 2}
            return torch.func.functional_call(self.inner, made, (x,))
        graph = self.scale if "graph" in self.how else 1
        self.inner.scale = torch.rand(WIDTH) * graph
        x = self.inner(x)
        self.inner.scale = torch.rand(WIDTH) * graph
        return self.inner(x)


def fewer(n: int) -> Call:
    return (drawn(n, LENGTH - 2 * n, WIDTH),), {}


row("code around a Function over a module sets what that reads")(between(Setting))
row("code around a Function over a module sets what that reads, other sizes", call=fewer)(between(Setting))
for how in ("an attribute", "an attribute, graph", "a parameter"):
    row(f"a tensor of the forward handed to a Function's module: {how}")(
        between(type("Handing", (Handing,), {"how": how}))
    )


class Later(Layer):
    """Changes what it holds once it is on."""

    buffer = False

    def __init__(self) -> None:
        super().__init__()
        self.on, self.number, self.seen = False, 0, []
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on and self.buffer:
            self.table.mul_(1.5)
        elif self.on:
            self.number += 1
            self.seen.append(self.number)
        return super().forward(x * (self.table + self.number + len(self.seen)))


later = lambda net, n: [setattr(block, "on", n > 1) for block in net.odd]  # noqa: E731
row("attributes beside a Function over a module that begin to change", later)(between(Later))
row("a buffer beside a Function over a module that begins to change", later, may_refuse="changed in place")(
    between(type("LaterBuffer", (Later,), {"buffer": True}))
)


class Noise(torch.autograd.Function):
    """Its own code draws the factor of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, drawn: Any) -> torch.Tensor:
        ctx.factor = 0.5 + drawn()
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


@torch.library.custom_op("rotoff_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * (0.5 + random.random())


noise.register_fake(torch.empty_like)
noise.register_autograd(
    lambda ctx, gradient: gradient * ctx.factor,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", output / inputs[0]),
)
UNSEEN: list[Row] = []  # what these operators do follows from nothing that they are given
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a registered operator that draws from Python's generator": noise,
    "apply_ that draws from NumPy's generator": lambda x: (
        x * torch.empty(x.shape[-1]).apply_(lambda _: 0.5 + numpy.random.rand())
    ),
}
for name, act in DRAWS.items():
    UNSEEN.append(Row(name, along(lambda net, x, n, act=act: act(torch.tanh(x * random.random()))), batch))
for name, source in {"Python's": random.random, "NumPy's": numpy.random.rand}.items():
    row(f"a Function that draws from {name} generator")(
        along(lambda net, x, n, source=source: Noise.apply(torch.tanh(x * random.random()), source))
    )
row(
    "a Function that begins to draw",
    sets("draws", lambda n: n > 1),
    may_refuse="generator of Python or NumPy",
)(along(lambda net, x, n: Noise.apply(torch.tanh(x), random.random if net.draws else float), draws=bool))


# -- modules that run mapped, compiled and scripted


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda one: one.sin())(self.act(self.linear(x)))


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")


def scripted(kind: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(kind())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.number, self.rate = nn.Linear(WIDTH, WIDTH), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.rate = self.rate * 0.5
        return torch.relu(self.linear(x)) * (1.0 + self.number + self.rate)


def hook_removed(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    handle = net.odd[0].register_forward_hook(lambda module, args, result: result * 2)
    loss = error_of(run(*call[0]))
    handle.remove()
    loss.backward()
    return loss


def hook_added(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    handle = net.odd[0].register_forward_hook(lambda module, args, result: result * 2)
    loss.backward()
    handle.remove()
    return loss


def functional(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    scaled = {name: parameter * 1.5 for name, parameter in run.named_parameters()}
    loss = error_of(torch.func.functional_call(run, scaled, call[0]))
    loss.backward()
    return loss


def swapped(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    inner = net.odd[0]
    own, inner.act = inner.act, nn.Sigmoid()
    loss = error_of(run(*call[0]))
    inner.act = own
    loss.backward()
    return loss


for name, part in {"mapped": Mapped, "compiled": compiled}.items():
    row(f"a hook removed before the backward, {name}", step=hook_removed)(between(part))
    row(f"a hook added before the backward, {name}", step=hook_added)(between(part))
    row(f"functional_call of the whole model, {name}", step=functional)(between(part))
row("a part of a mapped module swapped around the forward", step=swapped)(between(Mapped))
row("a scripted module with batch norm")(between(lambda: scripted(Normed)))
row("a scripted module with attributes", again=lambda net: [restart(b) for b in net.odd])(
    between(lambda: scripted(Counted))
)


def restart(inner: Any) -> None:
    inner.number, inner.rate = 0, 1.0


class Film(Mapped):
    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = None
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.scale is None else self.scale) + self.shift


class Conditioned(nn.Module):
    """Sets an attribute or a buffer of a mapped module. how: which, and whether it stays there."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.film, self.condition = Film(), nn.Linear(WIDTH, WIDTH)
        if "compiled" in self.how:
            self.film = torch.compile(self.film, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.condition(x).mean(0)
        if "functional" in self.how:
            return torch.func.functional_call(self.film, {"shift": condition}, (x,))
        film = getattr(self.film, "_orig_mod", self.film)
        if "buffer" in self.how:
            film.shift = condition.detach() if "detached" in self.how else condition
        else:
            film.scale = condition
        x = self.film(x)
        if "left" not in self.how:
            film.scale, film.shift = None, torch.zeros(WIDTH)
        return x


SET = (
    "attribute",
    "attribute, left",
    "attribute, compiled",
    "buffer",
    "buffer, left",
    "buffer, detached",
    "functional",
)
for how in SET:
    row(f"a mapped module conditioned by another: {how}")(between(type("Conditioned", (Conditioned,), {"how": how})))


class Cell(Mapped):
    """Keeps its state, with its graph, for its next call."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = super().forward(x if self.state is None else x + self.state)
        return self.state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell.state = None
        for _ in range(3):
            x = self.cell(x)
        self.cell.state = None
        return x


class Ensemble(nn.Module):
    """Runs its members at once, by ``functional_call`` within ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {k: torch.stack([m.get_parameter(k) for m in self.members]) for k in ("weight", "bias")}
        call = torch.func.vmap(torch.func.functional_call, in_dims=(None, 0, None))
        return call(self.members[0], weights, (x,)).mean(0)


class Remembering(Mapped):
    """Keeps its last result with its graph."""

    reads, last = False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.last.detach().mean() if self.reads and self.last is not None else 0.0
        self.last = super().forward(x * (1 + factor))
        return self.last


class Seeding(nn.Module):
    """The arguments of its module change while that runs."""

    class Seeded(Mapped):
        def forward(self, x: torch.Tensor, generator: torch.Generator, seen: list[int]) -> torch.Tensor:
            seen.append(len(seen))
            return super().forward(x * torch.rand(WIDTH, generator=generator) * len(seen))

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator, self.number = self.Seeded(), torch.Generator().manual_seed(5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.number]
        x = self.inner(x, self.generator, seen)
        self.number += len(seen)
        return x


class Late(Mapped):
    """Begins to use ``vmap`` after it was measured."""

    maps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.maps else self.linear(x)


class MadeLate(Conditioned):
    """Begins to give its module parameters of its own making after it was measured."""

    maps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.maps:
            return self.film(x)
        return torch.func.functional_call(self.film, {"linear.weight": self.film.linear.weight * 2}, (x,))


row("a mapped cell with a state")(between(Recurrent))
row("an ensemble by functional_call within vmap")(between(Ensemble))
row("a mapped module that keeps its result")(between(Remembering))
row("a mapped module that reads its last result", may_refuse="'last' of Reads")(
    between(type("Reads", (Remembering,), {"reads": True}))
)
row("a mapped module whose arguments change while it runs")(between(Seeding))
for name, late in {"mapped": Late, "given parameters of its own making": MadeLate}.items():
    row(f"a module that comes to be {name}", lambda net, n: [setattr(b, "maps", n > 1) for b in net.odd],
        may_refuse="again", room=0.9)(between(late))  # fmt: skip


@row("mapped and other blocks in another order in each step", may_refuse="again")
class Turning(Trunk):
    start = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = nn.Sequential(Mapped(), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start += 1
        for n in range(self.many):
            x = self.blocks[(self.start + n) % self.many](x)
        return self.head(x)


# -- outside of the model


class Outward(nn.Module):
    """Counts, takes and draws outside of the model."""

    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.world = lambda: world

    def outside(self) -> float:
        world = self.world()
        world["calls"] += 1
        return float(1 + 0.01 * next(world["numbers"]) + 0.01 * world["calls"] + 0.1 * world["random"].random())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.outside()


class Experts(Outward):
    """A loop over the experts in use, each on the rows sent to it; which, goes by noise, too."""

    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__(world)
        self.drop, self.experts = nn.Dropout(0.3), nn.ModuleList(Outward(world) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.drop(super().forward(x))[:, :3] + 0.01 * self.seen
        chosen = (scores + torch.rand(3)).argmax(1)
        self.seen += 1
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero()[:, 0]
            if len(rows):
                out[rows] = expert(x[rows])
        return x + out


class Packs(Outward):
    """A recurrent layer on sequences of lengths that it computes."""

    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__(world)
        self.rows = nn.GRU(WIDTH // 8, WIDTH // 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).view(len(x), 8, -1)
        lengths = 1 + (x.detach().sum(2) > 0).sum(1).clamp(max=7)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rows(packed)[0], batch_first=True, total_length=8)[0].reshape(len(x), WIDTH)


class OfNodes(Outward):
    """Registers hooks on nodes of its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world, x = self.world(), super().forward(x)

        def count(*_: Any) -> None:
            world["calls"] += 1

        x.grad_fn.register_hook(count)
        x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 1.5,))
        x.grad_fn.register_hook(count).remove()
        assert isinstance(x.grad_fn, torch.autograd.graph.Node)
        return x if x.grad_fn.name().startswith("Mul") else x * 0


class LeavesOutside(Outward):
    """Leaves a tensor of its graph outside of the model, for the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.world()["left"].append(x.square().mean())
        x.register_hook(lambda gradient: gradient * 1.5)
        return x


def hooked(register: Callable[[dict[str, Any], nn.Module], Any]) -> Callable[[dict[str, Any]], nn.Module]:
    def make(world: dict[str, Any]) -> nn.Module:
        module = nn.Sequential(Outward(world), nn.Linear(WIDTH, WIDTH), Outward(world))
        register(world, module)
        return module

    return make


def halved(world: dict[str, Any]) -> Callable[..., Any]:
    def hook(module: nn.Module, *gradients: Any) -> Any:
        world["calls"] += 1
        return tuple(None if g is None else g * (0.5 + 0.01 * world["calls"]) for g in gradients[0])

    return hook


def with_numbers(world: dict[str, Any]) -> Callable[..., Any]:
    return lambda module, args, output: output * (1 + 0.01 * next(world["numbers"]))


PARTS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "experts": Experts,
    "a loss": LeavesOutside,
    "packed sequences": Packs,
    "hooks of nodes": OfNodes,
    "a forward hook": hooked(lambda world, m: m.register_forward_hook(with_numbers(world))),
    "a full backward hook": hooked(lambda world, m: m.register_full_backward_hook(halved(world))),
    "a full backward pre-hook": hooked(lambda world, m: m.register_full_backward_pre_hook(halved(world))),
    "a backward hook of the older form": hooked(lambda world, m: m[1].register_backward_hook(halved(world))),
}


def begun(world: dict[str, Any]) -> None:
    world.update(calls=0, numbers=itertools.count(), random=random.Random(0), left=deque())


class Around(Trunk):
    """Has such a part after each block."""

    part: Callable[[dict[str, Any]], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.outer: dict[str, Any] = {}
        begun(self.outer)
        self.odd = nn.ModuleList(type(self).part(self.outer) for _ in range(self.many))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x + 0.5 * torch.tanh(self.odd[n](x))


def with_what_is_left(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0])) + sum(net.outer["left"])
    net.outer["left"].clear()
    loss.backward()
    return loss


for name, part in PARTS.items():
    row(
        f"outside of the model: {name}",
        step=with_what_is_left,
        again=lambda net: begun(net.outer),
        may_refuse="adds tensors of the graph to its attribute 'outer'" if name == "a loss" else None,
    )(type("Around", (Around,), {"part": staticmethod(part)}))


# -- from the third step on


class Kept:
    """What nobody can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OverBlock(torch.autograd.Function):
    """Uses a module that it is not given."""

    module: nn.Module

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x + OverBlock.module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def numbers_of(odd: str) -> Iterator[int]:
    """Always the same where the forward may run once more."""
    return itertools.repeat(1) if odd == "a Function over a block" else itertools.count(1)


class FromTheThird(Trunk):
    """Takes a number from an iterator in each step; from the third on it does something odd, too."""

    odd, step, numbers = "", 0, None

    def forward(self, x: torch.Tensor) -> Any:
        self.step += 1
        odd = self.odd if self.step > 2 else ""
        if self.numbers is None:
            self.numbers = numbers_of(self.odd)
        x, beside = x * next(self.numbers), None
        for n, block in enumerate(self.blocks):
            x = block(x)
            if n == 2 and odd == "a sparse product":
                x = torch.sparse.mm(torch.eye(x.shape[0]).to_sparse(), x)
            elif n == 2 and odd == "a Function over a block":
                OverBlock.module = block
                x = OverBlock.apply(x)
        if odd == "a distribution returned":
            beside = torch.distributions.Normal(x.detach(), 1.0)
        elif odd == "an object with a tensor of the graph returned":
            beside = Kept(x.tanh())
        elif odd == "a nested tensor returned":
            beside = torch.nested.nested_tensor([x.detach()])
        return self.head(x) * 1.5, beside


def of_both(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    result, beside = run(*call[0])
    loss = result.square().mean() + (beside.x.mean() if isinstance(beside, Kept) else 0)
    loss.backward()
    return loss


def from_the_start(net: Any) -> None:
    net.step, net.numbers = 0, numbers_of(net.odd)


for odd in (
    "a distribution returned",
    "an object with a tensor of the graph returned",
    "a nested tensor returned",
    "a sparse product",
    "a Function over a block",
):
    row(f"from the third step on: {odd}", step=of_both, again=from_the_start, room=0.5)(
        type("Third", (FromTheThird,), {"odd": odd})
    )


# -- what plans of calls could not follow: parameters that the forward changes, saved-tensor hooks of the model's own


class Teacher(nn.Module):
    """Changes a parameter without a gradient in its forward, in one of the ways to write to it."""

    way: Callable[[Any, torch.Tensor], object]

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x * self.mean.clone())
        with torch.no_grad():
            self.way(x)
        return y


CHANGED: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "itself": lambda net, x: net.mean.mul_(0.9),
    "by its data": lambda net, x: net.mean.data.copy_(x.mean(0)),
    "by new data": lambda net, x: setattr(net.mean, "data", x.mean(0)),
    "by an item": lambda net, x: net.mean.__setitem__(0, net.mean[1] + 0.1),
    "by foreach": lambda net, x: torch._foreach_mul_([net.mean], 0.9),
    "by out=": lambda net, x: torch.mul(net.mean, 0.9, out=net.mean),
}
for name, way in CHANGED.items():
    row(f"a parameter that the forward changes {name}", may_refuse="changes parameter")(
        between(type("Teacher", (Teacher,), {"way": way}))
    )


@row("an embedding with max_norm", may_refuse="changes parameter")
class Limited(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LENGTH, WIDTH, max_norm=0.5)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x + torch.sin(self.embedding(torch.arange(LENGTH)) * x)


@row("saved-tensor hooks of the model's own", may_refuse="saved-tensor hooks")
class Rounds(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return torch.sin(x)
