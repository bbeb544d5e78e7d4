"""Models that train with everything placed: between them they have each way in which a step reads parameters. Each with
its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import ALL, Attention, Does, Residual, linears, several, up_and_down
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Batch = Callable[[], torch.Tensor]


def tied(width: int = 32, words: int = 300) -> nn.Module:
    """A language model whose head has the weight of its embedding."""
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, Attention(width, 4), Residual(width), nn.LayerNorm(width), head)


def reads(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights itself, and all of them in a list."""
    y = net.layer(x) * net.several[0] + net.layer.weight.sum(0)
    return y + 1e-3 * sum(p.square().sum() for p in net.parameters()) + float(net.several[0].mean())


def shares(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs a block several times, and keeps a view of its weight meanwhile."""
    weight, turned = net.between[0].weight.to(x.dtype), net.between[1].weight.t()
    for layer in net.between:
        x = x + net.block(torch.tanh(layer(x)))
    return x @ weight @ turned


def repeats(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs its blocks `times` times, one after the other."""
    for _ in range(net.times):
        x = net.blocks(x)
    return net.head(x)


def shared() -> nn.Module:
    """A block that runs four times, between others."""
    block = Residual(64)
    return nn.Sequential(nn.Linear(64, 64), block, block, block, block, nn.Linear(64, 64))


class Times(torch.autograd.Function):
    """Keeps its weight in attributes of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w, ctx.turned = x, w, w.t()
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (g,) = gradients
        return g @ ctx.turned + 0 * (g @ ctx.w.t()), ctx.x.t() @ g


def keeps(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Its weights in attributes of its own, and returns one."""
    if not hasattr(net, "all_of_them"):
        net.all_of_them = list(net.parameters())
        net.first = [net.layers[0].weight]
    for layer in net.layers:
        x = torch.tanh(layer(Times.apply(x, layer.weight)))
    return x @ net.first[0] + sum(p.sum() for p in net.all_of_them)


def writes(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Overwrites a weight that it has read."""
    for layer in net.layers:
        x = torch.tanh(layer(x) + net.codes)
        with torch.no_grad():
            net.codes.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x


def checkpoints(reentrant: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """PyTorch's own checkpoint is inside."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for block in net.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return x

    return forward


def casts(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Autocast casts a weight once for two calls."""
    with torch.autocast("cpu", torch.bfloat16):
        return net.last(net.twice(torch.tanh(net.twice(net.twice(net.first(x)))))).float()


def mapped() -> nn.Module:
    """Its first and its last layer have one weight, and the first gets what torch.func has made."""
    first, last = nn.Linear(32, 32), nn.Linear(32, 32)
    last.weight = first.weight
    layers = nn.Sequential(*(Residual(32) for _ in range(6)))
    return Does(
        lambda net, x: net.last(net.layers(net.first(torch.func.vmap(torch.tanh)(x)))),
        first=first, layers=layers, last=last,
    )  # fmt: skip


def paused(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Its stages begin with a call without gradients, and go on with calls that need those of their parameters."""
    for n, (block, layer) in enumerate(zip(net.blocks, net.layers, strict=True)):
        x = x + block(x)
        with torch.inference_mode() if n == 1 else torch.no_grad():
            mean = x.mean(0)
        x = x + layer(x * mean.clone()).tanh()
    return x


def joins(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A token and its words before each block: in a batch of 1 the token's gradient is a part of that of both. It comes
    before the backward of the stage that reads the token, and some get none."""
    for n, (token, block) in enumerate(zip(net.tokens, net.blocks, strict=True)):
        x = block(net.shared(torch.cat([token.detach() if n in net.detached else token, x], 1)))
    return x


def joined(shared: nn.Module, *detached: int) -> nn.Module:
    tokens = nn.ParameterList([torch.randn(1, 1, 32) for _ in range(4)])
    return Does(joins, blocks=several(4, 32, 48), shared=shared, tokens=tokens, detached=detached)


def adapts(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Low-rank adapters beside frozen layers."""
    for base, down, up in zip(net.base, net.down, net.up, strict=True):
        x = x + torch.tanh(base(x) + up(down(x)))
    return x


def adapted(width: int = 64, layers: int = 5, does: Any = adapts) -> Any:
    base = linears(layers, width).requires_grad_(False)
    down, up = (
        nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(layers)) for sizes in ((width, 4), (4, width))
    )
    return Does(does, base=base, down=down, up=up)


def recurs(width: int = 32, out: int = 16, layers: int = 2) -> nn.Module:
    cells = nn.LSTM(width, out, layers, batch_first=True)
    return Does(lambda net, x: net.cells(net.before(x))[0], before=nn.Linear(width, width), cells=cells)


def dropping(width: int) -> nn.Module:
    """Two layers with dropout in between, which cuDNN draws from a buffer of its own."""
    return Does(lambda net, x: net.cells(x)[0], cells=nn.LSTM(width, width, 2, dropout=0.5, batch_first=True))


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
    "reads": (lambda: Does(reads, layer=nn.Linear(32, 32), several=nn.ParameterList([torch.randn(32)])), numbers(64, 32)),
    "shares": (lambda: Does(shares, block=up_and_down(32, 48), between=linears(3)), numbers(64, 32)),
    "repeats": (lambda: Does(repeats, times=2, blocks=nn.Sequential(Residual(16), Residual(16)), head=nn.Linear(16, 4)), numbers(24, 16)),
    "keeps": (lambda: Does(keeps, layers=linears(4)), numbers(64, 32)),
    "writes": (lambda: Does(writes, layers=linears(3), codes=nn.Parameter(torch.randn(32), False)), numbers(64, 32)),
    "expanded": (lambda: Does(lambda net, x: net.layer(x) * net.row, layer=nn.Linear(32, 32), row=nn.Parameter(torch.randn(32).expand(64, 32), False)), numbers(64, 32)),
    "checkpoints": (lambda: Does(checkpoints(False), blocks=several(3, 32, 64)), numbers(64, 32)),
    "reentrant": (lambda: Does(checkpoints(True), blocks=several(3, 32, 64)), numbers(64, 32)),
    "casts": (lambda: Does(casts, **{name: nn.Linear(32, 32) for name in ("first", "twice", "last")}), numbers(64, 32)),
    "mapped": (mapped, numbers(24, 32)),
    "paused": (lambda: Does(paused, blocks=several(4, 16, 32), layers=linears(4, 16)), numbers(24, 16)),
    "joins": (lambda: joined(nn.Linear(32, 32)), numbers(1, 64, 32)),
    "joins in part": (lambda: joined(nn.Identity(), 1, 3), numbers(1, 64, 32)),
    "adapted": (adapted, numbers(16, 64)),
    "lstm": (recurs, numbers(8, 12, 32)),
    "parametrized": (parametrized, numbers(64, 32)),
    "spectral": (spectral, numbers(2, 3, 8, 8)),
    "first frozen": (first_frozen, numbers(64, 32)),
    "encoder": (encoder, numbers(8, 12, 32)),
    "encoder in eval": (lambda: encoder().eval(), numbers(8, 12, 32)),
}  # fmt: skip
SIZED: dict[str, tuple[Callable[[], nn.Module], Batch]] = {  # larger ones, of whose memory parameters have a large part
    "deep": (lambda: nn.Sequential(*deep(96, 5), nn.Linear(96, 96)), numbers(128, 96)),
    "tied": (tied, words(300, 8, 16)),
    "no biases": (lambda: nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(6))), numbers(8, 96)),
    "first frozen": (first_frozen, numbers(64, 32)),
    "adapted": (lambda: adapted(128), numbers(64, 128)),
    "shared": (shared, numbers(64, 64)),
    "lstm": (lambda: nn.Sequential(recurs(48, 48, 1), recurs(48, 48, 1)), numbers(8, 16, 48)),
    "small": (lambda: nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()), numbers(64, 24)),
    "narrow": (lambda: nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(60, 60), nn.Tanh()))), numbers(16, 60)),
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
