"""Models that train with everything placed: between them they have each way in which a step reads parameters. Each with
its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import ALL, Attention, Residual
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Batch = Callable[[], torch.Tensor]


class Language(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 2, words: int = 50, tie: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(nn.Sequential(Attention(width, 4), Residual(width)) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Reads(nn.Module):
    """Reads weights itself, and all of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(32, 32), nn.Parameter(torch.randn(32))
        self.several = [self.scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.several[0] + self.layer.weight.sum(0)
        return y + 1e-3 * sum(p.square().sum() for p in self.parameters()) + float(self.scale.mean())


class Shares(nn.Module):
    """Runs a block several times, and keeps a view of its weight meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        self.between = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, turned = self.between[0].weight.to(x.dtype), self.between[1].weight.t()
        for layer in self.between:
            x = x + self.block(torch.tanh(layer(x)))
        return x @ weight @ turned


class Repeats(nn.Module):
    """Runs its blocks `times` times, one after the other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.times = 2
        self.blocks, self.head = nn.Sequential(*(Residual(width) for _ in range(2))), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.blocks(x)
        return self.head(x)


class Shared(nn.Module):
    """A block that runs four times, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(64, 64), Residual(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(4):
            x = self.block(x)
        return self.last(x)


class Keeps(nn.Module):
    """Keeps its weights in attributes of its own, of a function of its own, and returns one."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.x, ctx.w, ctx.turned = x, w, w.t()
            return x @ w

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (g,) = gradients
            return g @ ctx.turned + 0 * (g @ ctx.w.t()), ctx.x.t() @ g

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "all_of_them"):
            self.all_of_them = list(self.parameters())
            self.first: Any = [self.layers[0].weight]
        for layer in self.layers:
            x = torch.tanh(layer(self.Times.apply(x, layer.weight)))
        return x @ self.first[0] + sum(p.sum() for p in self.all_of_them)


class Writes(nn.Module):
    """Overwrites a weight that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.codes = nn.Parameter(torch.randn(32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.codes)
            with torch.no_grad():
                self.codes.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x


class Checkpoints(nn.Module):
    """PyTorch's own checkpoint is inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Casts(nn.Module):
    """Autocast casts a weight once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.twice(torch.tanh(self.twice(self.twice(self.first(x)))))).float()


class Mapped(nn.Module):
    """Its first and its last layer have one weight, and the first gets what torch.func has made."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.Sequential(*(Residual(width) for _ in range(6)))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.first(torch.func.vmap(torch.tanh)(x))))


class Paused(nn.Module):
    """Its stages begin with a call without gradients, and go on with calls that need those of their parameters."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, (block, layer) in enumerate(zip(self.blocks, self.layers, strict=True)):
            x = x + block(x)
            with torch.inference_mode() if n == 1 else torch.no_grad():
                mean = x.mean(0)
            x = x + layer(x * mean.clone()).tanh()
        return x


class Adapted(nn.Module):
    """Low-rank adapters beside frozen layers."""

    def __init__(self, width: int = 64, layers: int = 5) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(4, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = x + torch.tanh(base(x) + up(down(x)))
        return x


class Recurs(nn.Module):
    def __init__(self, width: int = 32, out: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.before, self.cells = nn.Linear(width, width), nn.LSTM(width, out, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(self.before(x))[0]


def deep(width: int = 64, layers: int = 4, bias: bool = True) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width, bias), nn.GELU())))


def first_frozen() -> nn.Module:
    """The frozen layers need more memory than the trained ones."""
    layers = [
        (nn.Linear(32, wide), nn.BatchNorm1d(wide), nn.GELU(), nn.Linear(wide, 32)) for wide in (256, 256, 64, 64)
    ]
    model = nn.Sequential(*(nn.Sequential(*one) for one in layers), nn.Linear(32, 4))
    model[:2].requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3))
    return nn.Sequential(*layers)


def spectral() -> nn.Module:
    """Reads its second weight again after a view of it."""
    first, second = (parametrizations.spectral_norm(nn.Conv2d(size, 16, 3, padding=1)) for size in (3, 16))
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.Flatten(), nn.Linear(1024, 10))


def parametrized() -> nn.Module:
    normed = parametrizations.weight_norm(nn.Linear(32, 32))
    return nn.Sequential(normed, nn.Tanh(), parametrizations.orthogonal(nn.Linear(32, 32)), nn.Linear(32, 32))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True), 2)


def numbers(*shape: int) -> Batch:
    return lambda: torch.randn(*shape)


def words(count: int, *shape: int) -> Batch:
    return lambda: torch.randint(0, count, shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "mlp": (deep, numbers(64, 64)),
    "language": (Language, words(50, 4, 12)),
    "tied": (lambda: Language(tie=True), words(50, 8, 16)),
    "reads": (Reads, numbers(64, 32)),
    "shares": (Shares, numbers(64, 32)),
    "repeats": (Repeats, numbers(24, 16)),
    "keeps": (Keeps, numbers(64, 32)),
    "writes": (Writes, numbers(64, 32)),
    "checkpoints": (lambda: Checkpoints(False), numbers(64, 32)),
    "reentrant": (lambda: Checkpoints(True), numbers(64, 32)),
    "casts": (Casts, numbers(64, 32)),
    "mapped": (Mapped, numbers(24, 32)),
    "paused": (Paused, numbers(24, 16)),
    "adapted": (Adapted, numbers(16, 64)),
    "lstm": (Recurs, numbers(8, 12, 32)),
    "parametrized": (parametrized, numbers(64, 32)),
    "spectral": (spectral, numbers(2, 3, 8, 8)),
    "convolutions": (convolutions, numbers(4, 3, 16, 16)),
    "first frozen": (first_frozen, numbers(64, 32)),
    "encoder": (encoder, numbers(8, 12, 32)),
    "encoder in eval": (lambda: encoder().eval(), numbers(8, 12, 32)),
}  # fmt: skip
SIZED: dict[str, tuple[Callable[[], nn.Module], Batch]] = {  # larger ones, of whose memory parameters have a large part
    "deep": (lambda: nn.Sequential(*deep(96, 5), nn.Linear(96, 96)), numbers(128, 96)),
    "tied": (lambda: Language(32, 1, 300, tie=True), words(300, 8, 16)),
    "no biases": (lambda: nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(6))), numbers(8, 96)),
    "first frozen": (first_frozen, numbers(64, 32)),
    "adapted": (lambda: Adapted(128), numbers(64, 128)),
    "shared": (Shared, numbers(64, 64)),
    "lstm": (lambda: nn.Sequential(Recurs(48, 48, 1), Recurs(48, 48, 1)), numbers(8, 16, 48)),
    "small": (lambda: nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()), numbers(64, 24)),
    "convolutions": (lambda: nn.Sequential(*(layer for n in (3, 16, 16) for layer in (
        nn.Conv2d(n, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()))), numbers(4, 3, 12, 12)),
}  # fmt: skip


def drawn(name: str, table: Any = None) -> tuple[nn.Module, Batch]:
    """The model named `name`, always with the same numbers, and what draws batches."""
    torch.manual_seed(0)
    if table is None and name in ALL:
        return ALL[name]()
    make, batch = (table or MODELS)[name]
    return make(), batch
