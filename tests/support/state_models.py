"""Models whose forwards read and change state of their own: buffers through views, counters, settings. Rows of the table
in test_changing_models.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from step_by_step import nothing
from torch import nn
from torch.nn import functional as F
from trunks import LENGTH, WIDTH, Block, Long, Trunk, at, made_of, row


def everywhere(name: str, block: type[nn.Module], change: Callable[[Any, int], object] = nothing, **more: Any) -> None:
    """Two rows: a model of such blocks with a forward of its own, and an nn.Sequential of them."""
    row(name, change, **more)(made_of(block))
    row(f"{name}, in an nn.Sequential", change, **more)(lambda: nn.Sequential(*[block() for _ in range(5)]))


# -- buffers


class Averages(Block):
    """Scales by an average of its inputs, which it updates in one of the ways to write to a buffer."""

    write: Callable[[torch.Tensor, torch.Tensor], object]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.average[0].clone())
        with torch.no_grad():
            type(self).write(self.average, x.detach().mean(0))
        return y


for _name, _write in {
    "by itself": lambda average, mean: average.mul_(0.9).add_(mean, alpha=0.1),
    "through its data": lambda average, mean: average.data.mul_(0.9).add_(mean, alpha=0.1),
    "detached": lambda average, mean: average.detach().mul_(0.9).add_(mean, alpha=0.1),
    "through a row": lambda average, mean: average[0].mul_(0.9).add_(mean, alpha=0.1),
    "through a part of unbind": lambda average, mean: average.unbind()[0].lerp_(mean, 0.1),
}.items():
    everywhere(f"a buffer of each block written {_name}", type("Averages", (Averages,), {"write": _write}))


class Renormed(Block):
    """`embedding` changes its table, which no name or schema says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + F.embedding(torch.arange(LENGTH), self.table, max_norm=0.5))


everywhere("a buffer that a call changes unannounced", Renormed)


# -- attributes that the forward sets, and reads in the next step


class Remembers(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x * self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


class Decays(Remembers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Block.forward(self, x * self.mean.clone())
        self.mean.mul_(0.9)
        return y


class Counts(Block):
    """Goes another way from the third call on, which measuring does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Module()  # which is never called itself
        self.count = self.held.count = 0

    def now(self) -> int:
        self.count += 1
        return self.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(super().forward(x) * (3.0 if self.now() > 2 else 1.0))


class CountsElsewhere(Counts):
    def now(self) -> int:
        self.held.count += 1
        return self.held.count


class Tosses(Block):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.chance.random()


class Draws(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)


class DrawsFromTorchs(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.default_generator


class Thaws(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.requires_grad_()
        return super().forward(x)


class Router(Block):
    """``to`` sets the data of each parameter, to what they are already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up = self.up.to(x.dtype)
        return super().forward(x)


class Casts(Block):
    """A call that returns its tensor as it is, and one by the same name that does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).to(x.dtype)
        return x + self.down(torch.tanh(h).to(torch.float64).to(x.dtype))


class Circular(Block):
    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Any] = {"scale": 1.0}
        self.parts["all"] = [self.parts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.parts["scale"]


def seed_all(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, Draws):
            module.generator.manual_seed(5)


everywhere("a tensor of each block replaced", Remembers)
everywhere("a tensor of each block that is no buffer changed in place", Decays)
everywhere("a count of each block whose threshold changes the course", Counts)
everywhere("a count in a module that is never called", CountsElsewhere)
everywhere("a random.Random of each block", Tosses)
everywhere("a torch.Generator of each block", Draws, at(0, seed_all))
everywhere("torch's own generator named", DrawsFromTorchs, at(0, seed_all))
everywhere("a parameter that is asked for a gradient", Thaws)
everywhere("a module put in the type that it has", Router)
everywhere("a call that returns its tensor as it is", Casts)
row(
    "containers that hold themselves",
    lambda net, n: [block.parts.update(scale=1.0 + 0.5 * n) for block in net.blocks],
)(made_of(Circular))


# -- modules and parameters that change


class Drops(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


def thawed_from_the_end(net: nn.Module, n: int) -> None:
    """As in fine-tuning, and frozen again."""
    for k, p in enumerate(net.parameters()):
        p.requires_grad_(k >= (14, 7, 0, 7, 14)[n])


def dropout_off(net: nn.Module, n: int) -> None:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.train(n != 1)  # in eval mode it saves nothing


everywhere("parts thawed from the end and frozen again", Block, thawed_from_the_end, room=0.8)
everywhere("dropout of all blocks in eval() in a step", Drops, dropout_off, room=0.6)
row("a part of an nn.Sequential swapped for another", at(1, lambda net: net.__setitem__(1, Block())), room=0.6)(
    lambda: nn.Sequential(*[Block() for _ in range(5)])
)
row("a block appended", at(2, lambda net: net.blocks.append(Block())), room=0.8)(Long)


# -- settings


class Settings(Trunk):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[torch.Tensor], torch.Tensor] = F.relu
        self.config = {"temperature": 1.0}
        self.order, self.pair = [0, 1, 2, 3], (1.0, 2.0)
        self.dtype, self.weights = torch.float32, torch.ones(WIDTH)
        self.history: list[float] = []
        self.nested: dict[str, Any] = {"a": {"scale": 1.0}, "rows": [[1.0], [2.0]], "box": SimpleNamespace(scale=1.0)}
        self.nested["box"].around = self.nested
        self.array, self.number = numpy.ones(3), numpy.float32(1.0)
        self.tables = {"used": torch.ones(WIDTH), "not used": torch.ones(WIDTH)}
        self.call = partial(torch.mul, torch.tensor(1.0))
        self.register_buffer("mask", None)
        self.register_parameter("bias", None)
        self.more = nn.ParameterDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in self.order:
            x = self.act(self.blocks[n](x)) / self.config["temperature"] * self.pair[0]
        x = x if self.mask is None else x * self.mask
        x = x if self.bias is None else x + self.bias
        for factor in self.more.values():
            x = x * factor
        factor = self.gain * self.nested["a"]["scale"] * self.nested["rows"][0][0] * self.nested["box"].scale
        x = self.call(x) * factor * float(self.array[0]) * float(self.number) * self.tables["used"]
        return x.to(self.dtype).float() * self.weights


def settings() -> nn.Module:
    """With a class of its own."""
    return type("Own", (Settings,), {})()


CHANGES = (
    lambda net: setattr(type(net), "gain", 2.0),
    lambda net: setattr(net, "act", torch.sigmoid),
    lambda net: net.config.update(temperature=2.0),
    lambda net: setattr(net, "order", [3, 2, 1]),
    lambda net: setattr(net, "pair", (3.0, 2.0)),
    lambda net: net.order.reverse(),
    lambda net: setattr(net, "dtype", torch.bfloat16),
    lambda net: setattr(net, "weights", torch.arange(float(WIDTH))),
    lambda net: setattr(net, "mask", torch.arange(float(WIDTH))),
    lambda net: setattr(net, "bias", nn.Parameter(torch.ones(WIDTH))),
    lambda net: net.order.append(0),
    lambda net: net.more.update({"a": nn.Parameter(torch.ones(WIDTH) * 2)}),
    lambda net: setattr(net, "gain", 3.0),
    lambda net: net.nested["a"].update(scale=2.0),
    lambda net: net.nested["rows"][0].__setitem__(0, 2.0),
    lambda net: setattr(net.nested["box"], "scale", 2.0),
    lambda net: net.array.fill(2.0),
    lambda net: setattr(net, "number", numpy.float32(2.0)),
    lambda net: net.tables.update(used=torch.arange(float(WIDTH))),
    lambda net: setattr(net, "call", partial(torch.mul, torch.tensor(2.0))),
)


def settings_changed(net: Any, n: int) -> None:
    """Five a step."""
    for change in CHANGES[5 * n - 5 : 5 * n] if n else ():
        change(net)


row("settings of all kinds changed", settings_changed, room=0.8)(settings)
