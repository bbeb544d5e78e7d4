"""Small models that between them do what makes replays hard; each with a way to draw a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = Callable[[], Any]


class Residual(nn.Module):
    """A transformer-like block: norm, wide middle, dropout, skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, w))


class Split(nn.Module):
    """One tensor in, a tuple out."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x), torch.sigmoid(x)


class Mix(nn.Module):
    """A tuple in, a tuple out, one of them passed on in another shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = pair
        return self.linear(x) * gate, gate * 0.5


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.cat(pair, dim=1)


class Fails(torch.autograd.Function):
    """Its backward fails where it is told to."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fails.now:
            raise MemoryError("injected")
        return gradient


class Stash(torch.autograd.Function):
    """Keeps what it needs on ctx, past all hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x * 2
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.kept


class Stasher(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Stash.apply(x)


class Counter(nn.Module):
    """A buffer that decides what the forward computes, and that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * torch.cos(self.calls)


class Mask(nn.Module):
    """Multiplies by a tensor that is neither parameter nor buffer, and lies there all the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask = (torch.arange(width) % 3 != 0).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


class Scale(nn.Module):
    """Saves nothing of its own: its backward unpacks only a parameter and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def mlp() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
    )
    return model, lambda: torch.randn(32, 16)


def residual() -> tuple[nn.Sequential, Batch]:
    return nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 8)), lambda: torch.randn(
        64, 16
    )


def convolutional() -> tuple[nn.Sequential, Batch]:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10))
    return nn.Sequential(stem, body, head), lambda: torch.randn(8, 3, 16, 16)


def language() -> tuple[nn.Sequential, Batch]:
    blocks = [nn.Sequential(Attention(32, 4), Residual(32)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50)), lambda: torch.randint(0, 50, (4, 12))


def tuples() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(nn.Linear(8, 16), Split(), Mix(16), nn.Sequential(Mix(16)), Join(), nn.Linear(32, 4))
    return model, lambda: torch.randn(32, 8)


def stateful() -> tuple[nn.Sequential, Batch]:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(
        nn.Linear(8, 16), Counter(), spectral, Stasher(), nn.RReLU(), Mask(16), Scale(), nn.Linear(16, 4)
    )
    return model, lambda: torch.randn(32, 8)


def recurrent() -> tuple[nn.Sequential, Batch]:
    class Last(nn.Module):
        def forward(self, result: Any) -> torch.Tensor:
            return result[0][:, -1] + result[1][0].sum()

    return nn.Sequential(
        nn.Linear(6, 12), nn.LSTM(12, 12, batch_first=True), Last(), nn.Linear(12, 3)
    ), lambda: torch.randn(8, 5, 6)


def frozen() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    for p in (*model[0].parameters(), *model[2].parameters(), *model[4].parameters()):
        p.requires_grad_(False)
    model[2].bias.requires_grad_(True)  # the chain begins here; stage 4 is frozen in the middle
    return model, lambda: torch.randn(32, 8)


def tied() -> tuple[nn.Sequential, Batch]:
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(16, 16), shared, nn.GELU(), shared)
    model[2].weight = shared.weight
    return model, lambda: torch.randn(32, 16)


def aliasing() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(
        nn.Identity(), nn.Unflatten(1, (4, 4)), nn.Linear(4, 8), nn.Flatten(), nn.ELU(inplace=True), nn.Linear(32, 32),
        nn.Identity(), nn.LeakyReLU(inplace=True), nn.Linear(32, 4), nn.Identity(),
    )  # fmt: skip
    return model, lambda: torch.randn(32, 16)


def overwriting() -> tuple[nn.Sequential, Batch]:
    """The first stage changes the batch in place."""
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), lambda: torch.randn(
        32, 16
    )


def differentiable_input() -> tuple[nn.Sequential, Batch]:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), lambda: torch.randn(
        32, 16, requires_grad=True
    )


class Masked(nn.Module):
    """Takes and hands on (x, a mask of the batch, a scale of the batch that needs a gradient, a table of its own)."""

    def __init__(self, width: int, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("table", torch.linspace(0, 1, width))

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, mask, scale = given[:3]
        table = self.table[None] if self.first else given[3]
        x = x + self.dropout(torch.tanh(self.linear(x) * scale + table)) * mask
        return x, mask, scale, table


def side_inputs() -> tuple[nn.Sequential, Batch]:
    class First(nn.Module):
        def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return given[0]

    model = nn.Sequential(*[Masked(16, first=n == 0) for n in range(4)], First(), nn.Linear(16, 4))

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randn(32, 16), torch.rand(32, 1) > 0.3, torch.rand(32, 16, requires_grad=True)

    return model, batch


def handed_on() -> tuple[nn.Sequential, Batch]:
    """An activation that two later stages get beside the main one, as encoders' outputs and first features are."""

    class Fork(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.relu(self.linear(x)), self.linear(x)

    class Use(Fork):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return torch.tanh(self.linear(pair[0])) + pair[1], pair[1]

    model = nn.Sequential(nn.Linear(8, 16), Fork(16), Use(16), Use(16), Join(), nn.Linear(32, 16), nn.Tanh())
    return model, lambda: torch.randn(32, 8)


def double() -> tuple[nn.Sequential, Batch]:
    model, _ = residual()
    return model.double(), lambda: torch.randn(64, 16, dtype=torch.float64)


ALL: dict[str, Callable[[], tuple[nn.Sequential, Batch]]] = {
    f.__name__: f
    for f in (
        mlp, residual, convolutional, language, tuples, stateful, recurrent, frozen, tied, aliasing, overwriting,
        differentiable_input, double, side_inputs, handed_on,
    )
}  # fmt: skip


def train(model: nn.Module, batch: Batch, steps: int = 3, seed: int = 1) -> list[torch.Tensor]:
    """Train a few steps; everything that must not differ: losses, gradients, buffers, inputs' gradients, generator
    states."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    seen: list[torch.Tensor] = []
    for _ in range(steps):
        x = batch()
        output = model(x)
        loss = output.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [b.clone() for b in model.buffers()]
        given = x if isinstance(x, tuple) else (x,)
        seen += [t.grad.clone() for t in given if t.grad is not None]
    return [*seen, torch.get_rng_state()]


@cache
def plain(name: str, steps: int = 3) -> list[torch.Tensor]:
    """What `train` sees of the model named `name`."""
    model, batch = fresh(name)
    return train(model, batch, steps)


def fresh(name: str) -> tuple[nn.Sequential, Batch]:
    """The model named `name`, always with the same parameters, in training mode."""
    torch.manual_seed(0)
    return ALL[name]()


def move_masks(model: nn.Module) -> None:
    """To the GPU, those that are neither parameters nor buffers."""
    for module in model.modules():
        if isinstance(getattr(module, "mask", None), torch.Tensor):
            module.mask = module.mask.cuda()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
