"""What something beside autograd's saved tensors holds (attributes of ``ctx``, closures of hooks, attributes, globals) is
there for whoever reads it, and is charged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_steps import smallest, step_peak
from torch import nn
from torch.nn import functional as F

import rotoff

WIDTH, LENGTH = 32, 128  # 16 KiB, three times a generator's state
Does = Callable[[Any, torch.Tensor], torch.Tensor]


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


class Swish(torch.autograd.Function):
    """Has autograd save its argument, and keeps a tensor beside that nobody else sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.gate = torch.sigmoid(x)
        return x * ctx.gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * ctx.gate * (1 + x * (1 - ctx.gate))


def hooked(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A hook that has another tensor of the forward."""
    other = x.tanh()
    y = x * 1.5
    y.register_hook(lambda grad: grad * other.detach())
    return y + other


# hooks that hold their own tensor: PyTorch never frees the graph of a forward that nobody ran backward
CYCLES: list[Any] = []
CACHE: dict[Any, torch.Tensor] = {}
GROWING: list[torch.Tensor] = []


def hooked_by_itself(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    CYCLES.append(y.register_hook(lambda grad: grad * y.detach().cos()))
    return y + 1.0


def applied(*functions: Any) -> Does:
    def does(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function.apply(x)
        return x

    return does


def keeping(keep: Does) -> Does:
    def does(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        keep(module, x)
        return x

    return does


MAKES: dict[str, tuple[Does | None, Does | None]] = {  # what is done in the middle of each block, and to its output
    "nothing": (None, None),
    "ctx": (applied(Swish), None),
    "ctx, the output of a stage": (None, applied(Exponential)),
    "ctx, several Functions": (applied(Exponential, Square, Swish), applied(Exponential)),
    "a hook's closure": (hooked, None),
    "a hook that has its tensor": (hooked_by_itself, None),
    "an attribute": (keeping(lambda module, x: setattr(module, "latest", x)), None),
    "an attribute, of the output": (None, keeping(lambda module, x: setattr(module, "latest", x))),
    "a global cache": (keeping(lambda module, x: CACHE.update({module: x.detach()})), None),
    "a global list that grows": (keeping(lambda module, x: GROWING.append(x.detach())), None),
}


class Block(nn.Module):
    def __init__(self, middle: Does | None = None, last: Does | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.does = middle, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle, last = self.does
        x = self.norm(x)
        x = middle(self, x) if middle else x
        x = self.down(F.gelu(self.up(x)))
        return last(self, x) if last else x


class Trunk(nn.Module):
    def __init__(self, name: str = "nothing") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*MAKES[name]) for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    CACHE.clear()
    GROWING.clear()
    return Trunk(name)


def planned(net: nn.Module, mode: str) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(net, cache_directory=None, stages=6, forms=mode == "joint").measure(draw())


def gradients(run: nn.Module, net: nn.Module) -> list[torch.Tensor]:
    found = []
    for n in range(2):
        torch.manual_seed(n)
        net.zero_grad()
        run(draw()).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("modes", [("remat", "offload"), ("joint",)], ids=["without forms", "with forms"])
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.grid(every=3)
def test_gradients_are_the_plain_ones_and_bytes_the_predicted_ones(name: str, modes: tuple[str, ...]) -> None:
    net = fresh(name)
    expected = gradients(net, net)
    net = fresh(name)
    wrapped = planned(net, modes[0])
    for mode in modes:
        least, most = smallest(wrapped, mode), wrapped.keep_all_memory
        for part in (0.0, 0.5, 0.8, 1.0):
            wrapped.compute_sequence(limit := least + int(part * max(0, most - least)), mode=mode, refine=False)
            assert step_peak(wrapped, draw) <= wrapped.get_expected_memory() <= limit, (mode, part)
            assert all(torch.equal(a, b) for a, b in zip(gradients(wrapped, net), expected, strict=True)), (mode, part)
    while CYCLES:
        CYCLES.pop().remove()
    wrapped.close()
