"""What something beside autograd's saved tensors holds (attributes of ``ctx``, closures of hooks, attributes, globals) is
there for whoever reads it, and is charged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Does
from planned_steps import bits_and_bytes
from torch import nn
from torch.nn import functional as F

WIDTH, LENGTH = 32, 128  # 16 KiB, three times a generator's state
Act = Callable[[Any, torch.Tensor], torch.Tensor]


def draw() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH)


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


def hooked_by_itself(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    CYCLES.append(y.register_hook(lambda grad: grad * y.detach().cos()))
    return y + 1.0


def applied(*functions: Any) -> Act:
    def does(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function.apply(x)
        return x

    return does


def keeping(keep: Act) -> Act:
    def does(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        keep(module, x)
        return x

    return does


MAKES: dict[str, tuple[Act | None, Act | None]] = {  # what is done in the middle of each block, and to its output
    "nothing": (None, None),
    "ctx": (applied(Swish), None),
    "ctx, the output of a stage": (None, applied(Exponential)),
    "ctx, several Functions": (applied(Exponential, Swish), applied(Exponential)),
    "a hook's closure": (hooked, None),
    "a hook that has its tensor": (hooked_by_itself, None),
    "an attribute": (keeping(lambda module, x: setattr(module, "latest", x)), None),
    "an attribute, of the output": (None, keeping(lambda module, x: setattr(module, "latest", x))),
}


def block(net: Any, x: torch.Tensor) -> torch.Tensor:
    middle, last = net.middle_and_last
    x = net.norm(x)
    x = middle(net, x) if middle else x
    x = net.down(F.gelu(net.up(x)))
    return last(net, x) if last else x


def trunk(name: str) -> nn.Module:
    blocks = (
        Does(
            block, middle_and_last=MAKES[name], norm=nn.LayerNorm(WIDTH), up=nn.Linear(WIDTH, 4 * WIDTH),
            down=nn.Linear(4 * WIDTH, WIDTH),
        )
        for _ in range(5)
    )  # fmt: skip
    return Does(lambda net, x: net.head(net.blocks(x)), blocks=nn.Sequential(*blocks), head=nn.Linear(WIDTH, WIDTH))


def fresh(name: str) -> nn.Module:
    torch.manual_seed(0)
    return trunk(name)


@pytest.mark.parametrize("modes", [("remat", "offload"), ("joint",)], ids=["without forms", "with forms"])
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.grid(every=3)
def test_gradients_are_the_plain_ones_and_bytes_the_predicted_ones(name: str, modes: tuple[str, ...]) -> None:
    make = functools.partial(fresh, name)
    bits_and_bytes(make(), draw, modes, (0.0, 0.5, 0.8, 1.0), fresh=make, stages=6, forms=modes == ("joint",))
    while CYCLES:
        CYCLES.pop().remove()
