"""Small models that between them do what makes replays hard; each with a way to draw a batch."""

from __future__ import annotations

from collections.abc import Callable
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


class Does(nn.Module):
    """Parts, and a forward that is a function of them and its inputs."""

    def __init__(self, does: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


def linears(count: int, width: int = 32) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


def up_and_down(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def several(count: int, width: int, inner: int) -> nn.ModuleList:
    return nn.ModuleList(up_and_down(width, inner) for _ in range(count))


class Stash(torch.autograd.Function):
    """Keeps what it needs on ctx, past all hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = x * 2
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.kept


class Kept:
    """What nobody can look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def ensemble(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs its members at once, by ``functional_call`` within ``vmap``, as PyTorch's tutorial on ensembles has it."""
    weights = {k: torch.stack([m.get_parameter(k) for m in net.members]) for k in ("weight", "bias")}
    call = torch.func.vmap(torch.func.functional_call, in_dims=(None, 0, None))
    return call(net.template or net.members[0], weights, (x,)).mean(0)


def members(width: int, template: nn.Module | None = None) -> nn.Module:
    """template: whose code is mapped, if not that of a member."""
    return Does(ensemble, members=linears(3, width), template=template)


def split() -> nn.Module:
    """One tensor in, a tuple out."""
    return Does(lambda net, x: (torch.tanh(x), torch.sigmoid(x)))


def mix(width: int) -> nn.Module:
    """A tuple in, a tuple out, one of them passed on in another shape."""
    return Does(lambda net, pair: (net.linear(pair[0]) * pair[1], pair[1] * 0.5), linear=nn.Linear(width, width))


def join() -> nn.Module:
    return Does(lambda net, pair: torch.cat(pair, dim=1))


def counted(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A buffer that decides what the forward computes, and that it changes."""
    net.calls += 1
    return x * torch.cos(net.calls)


def mlp() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
    )
    return model, lambda: torch.randn(32, 16)


def residual() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 8))
    return model, lambda: torch.randn(64, 16)


def convolutional() -> tuple[nn.Sequential, Batch]:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 4 * 4, 10))
    return nn.Sequential(stem, body, head), lambda: torch.randn(8, 3, 16, 16)


def language() -> tuple[nn.Sequential, Batch]:
    blocks = [nn.Sequential(Attention(32, 4), Residual(32)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(50, 32), *blocks, nn.Linear(32, 50)), lambda: torch.randint(0, 50, (4, 12))


def tuples() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(nn.Linear(8, 16), split(), mix(16), nn.Sequential(mix(16)), join(), nn.Linear(32, 4))
    return model, lambda: torch.randn(32, 8)


def stateful() -> tuple[nn.Sequential, Batch]:
    """A counter; a mask that is neither parameter nor buffer; a scale, whose backward unpacks it and its input alone."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model = nn.Sequential(
        nn.Linear(8, 16), Does(counted, calls=nn.Buffer(torch.zeros(()))), spectral, Does(lambda net, x: Stash.apply(x)),
        nn.RReLU(), Does(lambda net, x: x * net.mask, mask=(torch.arange(16) % 3 != 0).float()),
        Does(lambda net, x: x * net.scale, scale=nn.Parameter(torch.ones(()))), nn.Linear(16, 4),
    )  # fmt: skip
    return model, lambda: torch.randn(32, 8)


def recurrent() -> tuple[nn.Sequential, Batch]:
    last = Does(lambda net, result: result[0][:, -1] + result[1][0].sum())
    model = nn.Sequential(nn.Linear(6, 12), nn.LSTM(12, 12, batch_first=True), last, nn.Linear(12, 3))
    return model, lambda: torch.randn(8, 5, 6)


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
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, lambda: torch.randn(32, 16)


def differentiable_input() -> tuple[nn.Sequential, Batch]:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, lambda: torch.randn(32, 16, requires_grad=True)


def masked(net: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Takes and hands on (x, a mask of the batch, a scale of the batch that needs a gradient, a table of its own)."""
    x, mask, scale = given[:3]
    table = given[3] if len(given) > 3 else net.table[None]
    x = x + net.dropout(torch.tanh(net.linear(x) * scale + table)) * mask
    return x, mask, scale, table


def side_inputs() -> tuple[nn.Sequential, Batch]:
    stages = [
        Does(masked, linear=nn.Linear(16, 16), dropout=nn.Dropout(0.2), table=nn.Buffer(torch.linspace(0, 1, 16)))
        for _ in range(4)
    ]
    model = nn.Sequential(*stages, Does(lambda net, given: given[0]), nn.Linear(16, 4))
    return model, lambda: (torch.randn(32, 16), torch.rand(32, 1) > 0.3, torch.rand(32, 16, requires_grad=True))


def handed_on() -> tuple[nn.Sequential, Batch]:
    """An activation that two later stages get beside the main one, as encoders' outputs and first features are."""
    fork = Does(lambda net, x: (torch.relu(net.linear(x)), net.linear(x)), linear=nn.Linear(16, 16))
    uses = [
        Does(lambda net, pair: (torch.tanh(net.linear(pair[0])) + pair[1], pair[1]), linear=nn.Linear(16, 16))
        for _ in "ab"
    ]
    model = nn.Sequential(nn.Linear(8, 16), fork, *uses, join(), nn.Linear(32, 16), nn.Tanh())
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


def dropping() -> tuple[nn.Module, Batch]:
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(6)]
    return nn.Sequential(*blocks), lambda: torch.randn(64, 32)


def fresh(name: str) -> tuple[Any, Batch]:
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


TIMES = 16  # larger than the models' own batches


def many(name: str) -> tuple[nn.Sequential, Batch]:
    """The model `name`, and a way to draw a batch `TIMES` as large as its own."""
    model, batch = fresh(name)

    def joined(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts).detach().requires_grad_(parts[0].requires_grad)

    def draw() -> Any:
        batches = [batch() for _ in range(TIMES)]
        return tuple(map(joined, *batches)) if isinstance(batches[0], tuple) else joined(*batches)

    return model, draw
