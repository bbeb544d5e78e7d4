"""What the rows of test_changing_models.py are made of: a model of a few blocks, its batches, and the table itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from step_by_step import Call, Row, error_of, nothing
from torch import nn
from torch.nn import functional as F

WIDTH = 16
LENGTH = 16  # rows of a batch

TABLE: list[Row] = []


def drawn(n: int, *shape: int, of: int = 0) -> torch.Tensor:
    """The same numbers for the same `n` and `of`, whatever else is drawn."""
    generator = torch.Generator().manual_seed(1000 + 10 * n + of)
    return torch.randn(*(shape or (LENGTH, WIDTH)), generator=generator, dtype=torch.float32)


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
    """Blocks and a head. `along` is what a row adds between the blocks, `begin` what it does before them. What a
    subclass is given beside, as in ``class Counts(Trunk, count=int)``, makes attributes that each model has by itself.
    """

    made_of: Callable[[], nn.Module] = Block
    many = 4
    has: dict[str, Callable[[], Any]] = {}

    def __init_subclass__(cls, **has: Callable[[], Any]) -> None:
        cls.has = {**cls.has, **has}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.made_of() for _ in range(self.many))
        self.head = nn.Linear(WIDTH, 4)
        for name, make in self.has.items():
            setattr(self, name, make())

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

    many = 10


def along(act: Callable[[Any, torch.Tensor, int], torch.Tensor], of: type[Trunk] = Trunk, **has: Any) -> type[Trunk]:
    """A trunk that does ``act(net, x, n)`` after block `n`."""
    return type("Along", (of,), {"along": act}, **has)


Has = dict[str, Callable[[], Any]]


class Added(NamedTuple):
    """What a row adds between the blocks, with the parts that it has: for mixes of rows."""

    name: str
    act: Callable[[Any, torch.Tensor, int], torch.Tensor]
    change: Callable[[Any, int], object]
    has: Has
    again: Callable[[Any], object]


ADDED: list[Added] = []


def adds(
    name: str, change: Any = nothing, call: Any = batch, of: type[Trunk] = Trunk, has: Has | None = None, **more: Any
) -> Any:
    """Enters a trunk that does what the decorated ``act(net, x, n)`` does after block `n`."""

    def enter(act: Any) -> Any:
        if not {"step", "may_refuse", "raises"} & more.keys():
            ADDED.append(Added(name, act, change, has or {}, more.get("again") or (lambda net: None)))
        return row(name, change, call, **more)(along(act, of, **(has or {})))

    return enter


def runs(
    name: str, change: Any = nothing, call: Any = batch, of: type[Trunk] = Trunk, has: Has | None = None, **more: Any
) -> Any:
    """Enters a trunk whose forward is the decorated ``forward(net, x)``."""
    return lambda forward: row(name, change, call, **more)(type("Runs", (of,), {"forward": forward}, **(has or {})))


def made_of(block: Callable[[], nn.Module], of: type[Trunk] = Trunk) -> type[Trunk]:
    return type("MadeOf", (of,), {"made_of": staticmethod(block)})


def at(step: int, change: Callable[[Any], object]) -> Callable[[Any, int], object]:
    """A change before that step alone."""
    return lambda net, n: change(net) if n == step else None


def sets(name: str, value: Callable[[int], Any]) -> Callable[[Any, int], object]:
    """A change of an attribute before each step."""
    return lambda net, n: setattr(net, name, value(n))


def of_results(run: Any, net: Any, call: Call, n: int) -> torch.Tensor:
    return error_of(run(*call[0]))


def step_with(before: Any = None, between: Any = None, after: Any = None, loss: Any = of_results) -> Any:
    """A step with something done before its forward, before its backward and after it, each given the model, its call
    and the number of the step. before: returns handles of hooks, which go after the step. loss: runs the forward."""

    def step(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
        handles = (before and before(net, call, n)) or ()
        found = loss(run, net, call, n)
        with torch.no_grad():
            between and between(net, call, n)
        found.backward()
        after and after(net, call, n)
        for handle in handles:
            handle.remove()
        return found

    return step


def large(n: int) -> Call:
    """So large that the states of generators that a plan keeps weigh little."""
    return (drawn(n, 4 * LENGTH, WIDTH),), {}
