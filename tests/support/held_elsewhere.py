"""Models in which something beside autograd's saved tensors holds what stages make: attributes of ``ctx``, closures of
hooks, attributes of modules, globals. The rows of test_held_elsewhere.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from planned_steps import smallest, step_peak
from torch import nn
from torch.nn import functional as F

import rotoff

WIDTH, LENGTH = 32, 128  # 16 KiB, three times a generator's state
IN_A_SEQUENTIAL = ", in a Sequential"
MODES = ("remat", "offload", "joint")
PARTS = (0.0, 0.5, 0.8, 1.0)  # of the way from the smallest limit to keeping everything

MAKES: dict[str, Callable[[], nn.Module]] = {}


def draw() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH)


class Square(torch.autograd.Function):
    """Keeps its argument past all hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.x


class Exponential(torch.autograd.Function):
    """Keeps what it returns past all hooks, detached."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = (0.1 * x).exp()
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 0.1 * grad * ctx.y


class Sine(torch.autograd.Function):
    """Keeps a tensor that nobody else sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.slope = torch.cos(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.slope


class Swish(torch.autograd.Function):
    """Has autograd save its argument, and keeps a tensor beside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.gate = torch.sigmoid(x)
        return x * ctx.gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * ctx.gate * (1 + x * (1 - ctx.gate))


swish = Swish.apply  # as the documentation of PyTorch has it


class Block(nn.Module):
    """first, middle, last: what is done to its input, in the middle and to its output."""

    def __init__(self, first: Any = None, middle: Any = None, last: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.does = first, middle, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.does
        x = first(self, x) if first else x
        x = self.norm(x)
        x = middle(self, x) if middle else x
        x = self.down(F.gelu(self.up(x)))
        return last(self, x) if last else x


class Trunk(nn.Module):
    def __init__(self, **does: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**does) for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_block(*which: int, **does: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        trunk = Trunk()
        for n in which:
            trunk.blocks[n] = Block(**does)
        return trunk

    return make


def in_all(**does: Any) -> Callable[[], nn.Module]:
    return in_block(*range(5), **does)


def applied(*functions: Any) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def does(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function.apply(x)
        return x

    return does


MAKES["nothing"] = in_block()
MAKES["ctx, first stage"] = in_block(0, middle=applied(Square))
MAKES["ctx, middle stage"] = in_block(2, middle=applied(Square))
MAKES["ctx, last stage"] = in_block(4, last=applied(Square))
MAKES["ctx, every stage"] = in_all(middle=applied(Square))
MAKES["ctx, the input of a stage"] = in_all(first=applied(Square))
MAKES["ctx, the output of a stage"] = in_all(last=applied(Exponential))
MAKES["ctx, what the Function alone has made"] = in_all(middle=applied(Sine))
MAKES["ctx, several Functions"] = in_all(first=applied(Square), middle=applied(Sine, Square), last=applied(Exponential))
MAKES["ctx, a chain of Functions"] = in_all(middle=applied(Exponential, Square, Exponential, Sine))
MAKES["ctx, a Function known by its apply"] = in_all(middle=lambda module, x: swish(x))


def hooked(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A hook that has another tensor of the forward."""
    other = x.tanh()
    y = x * 1.5
    y.register_hook(lambda grad: grad * other.detach())
    return y + other


# hooks that hold their own tensor: PyTorch never frees the graph of a forward that nobody ran backward
CYCLES: list[Any] = []


def hooked_by_itself(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A hook that has the tensor it is on."""
    y = x * 1.5
    CYCLES.append(y.register_hook(lambda grad: grad * y.detach().cos()))
    return y + 1.0


def stashed(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.latest = x
    return x


def stashed_detached(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.latest = x.detach()
    return x


CACHE: dict[Any, torch.Tensor] = {}
GROWING: list[torch.Tensor] = []


def cached(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    CACHE[module] = x.detach()
    return x


def collected(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    GROWING.append(x.detach())
    return x


MAKES["a hook's closure"] = in_all(middle=hooked)
MAKES["a hook's closure, first stage"] = in_block(0, middle=hooked)
MAKES["a hook that has its tensor"] = in_all(middle=hooked_by_itself)
MAKES["an attribute"] = in_all(middle=stashed)
MAKES["an attribute, detached"] = in_all(middle=stashed_detached)
MAKES["an attribute, of the output"] = in_all(last=stashed)
MAKES["a global cache"] = in_all(middle=cached)
MAKES["a global cache, of the output"] = in_all(last=cached)
MAKES["a global list that grows"] = in_all(middle=collected)


def with_forward_hooks(keep: Callable[[nn.Module, Any, torch.Tensor], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        trunk = Trunk()
        for block in trunk.blocks:
            block.up.register_forward_hook(keep)
        return trunk

    return make


def keep_in_module(module: Any, _: Any, output: torch.Tensor) -> None:
    module.output = output.detach()


def keep_in_cache(module: nn.Module, _: Any, output: torch.Tensor) -> None:
    CACHE[module] = output


MAKES["a forward hook that keeps outputs in modules"] = with_forward_hooks(keep_in_module)
MAKES["a forward hook that keeps outputs elsewhere"] = with_forward_hooks(keep_in_cache)


def in_sequence(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        trunk: Any = make()
        return nn.Sequential(*trunk.blocks, trunk.head)

    return made


for _name, _make in list(MAKES.items()):
    MAKES[_name + IN_A_SEQUENTIAL] = in_sequence(_make)


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    CACHE.clear()
    GROWING.clear()
    return MAKES[name]()


def planned(net: nn.Module, name: str, mode: str, **options: Any) -> rotoff.Checkpointable:
    """The model `name`, measured; a Sequential by its modules."""
    stages = None if name.endswith(IN_A_SEQUENTIAL) else 6
    wrapped = rotoff.Checkpointable(net, cache_directory=None, stages=stages, forms=mode == "joint", **options)
    return wrapped.measure(draw())


class Told(NamedTuple):
    """part: of the way from the smallest limit to keeping everything. The rest are bytes."""

    part: float
    limit: int
    predicted: int
    measured: int


def bytes_and_plans(net: nn.Module, name: str, *modes: str) -> Iterator[tuple[Told, rotoff.Checkpointable]]:
    """Of each mode and limit."""
    wrapped = planned(net, name, modes[0])
    for mode in modes:
        least, most = smallest(wrapped, mode), wrapped.keep_all_memory
        for part in PARTS:
            wrapped.compute_sequence(limit := least + int(part * max(0, most - least)), mode=mode, refine=False)
            yield Told(part, limit, wrapped.get_expected_memory(), step_peak(wrapped, draw)), wrapped
    while CYCLES:
        CYCLES.pop().remove()
    wrapped.close()
