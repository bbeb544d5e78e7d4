"""Models that are odd in each step: views, types, functions of autograd, hooks, and what of PyTorch is none of its usual
operations. The rest of the table of test_changing_models.py."""

from __future__ import annotations

import functools
import io
import threading
from typing import Any

import torch
from models import Does
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from trunks import LENGTH, WIDTH, Block, Trunk, adds, along, drawn, large, made_of, row, runs, sets

# -- views and kinds of tensors


@adds("an expanded tensor that is saved, and overlapping windows")
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * x.mean(0, keepdim=True).tanh().expand_as(x)  # one row of bytes, saved as all
    windows = torch.cat([y, y[:, :6]], 1).unfold(1, 4, 2)[:, :8] * 1.5
    return torch.sin(x + windows.mean(2).repeat(1, 2) + (x.sum(1, keepdim=True) * 0.1).expand(-1, WIDTH))


@adds("complex numbers")
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    z = torch.fft.rfft(x)
    z = z * torch.polar(torch.ones_like(z.real), z.real * 0.1)
    return torch.tanh(x + torch.fft.irfft(z.conj() * z.abs(), n=WIDTH) * 0.1)


@runs("losses in storages of their inputs' size", call=large)
def _(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    losses = []
    for block in net.blocks:
        losses += [F.mse_loss(block(x), x), F.smooth_l1_loss(block(x), x)]
        x = block(x)
    return [net.head(x), *losses]


@adds("nested tensors inside", room=0.6)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    nt = torch.nested.as_nested_tensor([x[:4], x[4:]], layout=torch.jagged)
    return torch.cat([t * 1.1 for t in nt.unbind()])


@runs(
    "a batch of jagged tensors",
    call=lambda n: ((torch.nested.as_nested_tensor(list(drawn(n).split([3, LENGTH - 3])), layout=torch.jagged),), {}),
)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        x = block(x)
    return net.head(x).values()


row("a sparse matrix inside", may_refuse="sparse|storage", room=0.6)(
    along(lambda net, x, n: torch.sparse.mm(torch.eye(LENGTH).to_sparse(), x) * 1.01)
)


def saved_and_loaded(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@runs("a result overwritten unseen after autograd has saved it")
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    """By NumPy, two blocks later: the gradients are those of what it wrote."""
    x = kept = torch.sigmoid(net.blocks[0](x))
    for block in net.blocks[1:3]:
        x = block(x)
    kept.detach().numpy()[:] *= 0.5
    for block in net.blocks[3:]:
        x = block(x)
    return net.head(x + kept)


@runs("a result saved to a file and loaded")
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What the first block made, at the end."""
    x = kept = net.blocks[0](x)
    for block in net.blocks[1:]:
        x = block(x)
    return net.head(x + saved_and_loaded(kept.detach()))


# -- types, and what is not differentiated


def weights_used_twice(regions: int, cached: bool) -> type[Trunk]:
    """By one autocast region, which casts them once and adds up their gradients in bfloat16, or by several."""

    def forward(net: Any, x: torch.Tensor) -> Any:
        for _ in range(regions):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                for block in (*net.blocks, *net.blocks):
                    x = block(x)
        return net.head(x.float())

    return type("Twice", (Trunk,), {"forward": forward})


for _regions, _cached in ((1, True), (2, True), (2, False)):
    row(
        f"weights used twice, {_regions} autocast regions, cached: {_cached}, in steps of other sizes",
        call=lambda n: ((drawn(n, 16 - 2 * n, WIDTH),), {}),
        room=0.6,
    )(weights_used_twice(_regions, _cached))


@adds("a stop by detach_ in some steps", sets("stop", lambda n: n % 2 == 1), room=0.6, has={"stop": bool})
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * 1.5
    if net.stop and n == 1:
        y = y.detach_()
    return torch.sin(y) + x


@adds("inference_mode inside")
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    with torch.inference_mode():
        k = float(x.mean())
    return torch.sin(x) + k


# -- functions of autograd, and of torch.func


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2


row("a function of autograd that changes its input in place")(along(lambda net, x, n: torch.sin(Dirty.apply(x * 0.5))))


# -- what something beside autograd's saved tensors holds: attributes of ``ctx``, closures of hooks, attributes


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


HELD = "held elsewhere: "
row(HELD + "ctx, in the middle of a stage", call=large)(along(lambda net, x, n: torch.tanh(Swish.apply(torch.sin(x)))))
row(HELD + "ctx, the output of a stage", call=large)(along(lambda net, x, n: Exponential.apply(x)))
row(HELD + "ctx, several Functions", call=large)(
    along(lambda net, x, n: Exponential.apply(Swish.apply(Exponential.apply(x))))
)


@adds(HELD + "a hook's closure", call=large)
def _(net: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    other, y = x.tanh(), x * 0.5
    if y.requires_grad:
        y.register_hook(lambda grad: grad * other.detach())
    return torch.sin(y + other)


@row(HELD + "a hook that has its tensor", call=large)
class Cycles(Trunk, handles=list):
    """PyTorch never frees the graph of a forward that nobody ran backward."""

    def begin(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 0.5
        if y.requires_grad:
            self.handles.append(y.register_hook(lambda grad: grad * y.detach().cos()))
        return torch.sin(y) + 1.0


for _does in (torch.sin, lambda x: x):

    @adds(HELD + f"an attribute{'' if _does is torch.sin else ', of the output'}", call=large, has={"latest": dict})
    def _(net: Any, x: torch.Tensor, n: int, does: Any = _does) -> torch.Tensor:
        net.latest[n] = x = x * 1.5
        return does(x)


def in_thread(what: Any) -> Any:
    box: list[Any] = []
    t = threading.Thread(target=lambda: box.append(what()))
    t.start()
    t.join()
    return box[0]


row("a thread that runs a part of the forward", may_refuse="thread|cannot see|outside of torch", room=0.6)(
    along(lambda net, x, n: x + in_thread(lambda: torch.sin(x) * 0.5))
)


# -- hooks


@row("hooks on the whole model's gradient, and on parameters' own", room=0.6)
class HookedWhole(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else g * 2 for g in gi))
        self.blocks[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.7,))
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])


# -- checkpoints


@row("checkpoint with a generator's preserve", call=large)
class Checkpoints(Trunk, drop=lambda: nn.Dropout(0.2)):
    def piece(self, x: torch.Tensor, k: float) -> torch.Tensor:
        return self.drop(torch.sin(x * k))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return checkpoint(self.piece, x, 1.0 + 0.1 * n, use_reentrant=False)


selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
row("selective checkpoint contexts")(
    along(lambda net, x, n: checkpoint(torch.tanh, x, use_reentrant=False, context_fn=selective))
)


# -- modules


row("a module called twice with state")(
    along(lambda net, x, n: net.bn(net.bn(x)) + x, bn=lambda: nn.BatchNorm1d(WIDTH))
)


class Encoded(Trunk):
    """PyTorch runs a frozen encoder by kernels of its own, which leave out what is padded."""

    frozen = True

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 2)
        self.enc.requires_grad_(not self.frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.enc.eval()
        padded = torch.arange(4).expand(4, 4) > torch.tensor([[3], [1], [2], [2]])
        with torch.set_grad_enabled(self.frozen):
            x = x + self.enc(x.view(4, 4, WIDTH), src_key_padding_mask=padded).reshape(LENGTH, WIDTH)
        return super().forward(x)


row("a frozen encoder in eval mode, with a mask of what is padded")(Encoded)
row("an encoder in eval mode under no_grad")(type("Ungraded", (Encoded,), {"frozen": False}))


# -- what the caller does


def state_dicts(net: Any, n: int) -> None:
    if n in (1, 2):
        net.load_state_dict({k: (v * 0.9).clone() for k, v in net.state_dict().items()}, assign=n == 2)
    if n == 3:
        torch.save(net.state_dict(), io.BytesIO())
        for block in net.blocks:
            nn.init.constant_(block.down.weight, 0.01)


row("a state_dict loaded, assigned and saved, and weights set anew between steps", state_dicts)(Trunk)


@runs("an input returned as it is", room=0.6)
def _(net: Any, x: torch.Tensor) -> Any:
    return Trunk.forward(net, x), x


@runs(
    "an input that needs a gradient and is changed in place",
    may_refuse="in-place operation",
    call=lambda n: ((drawn(n).requires_grad_() * 1.0,), {}),
    room=0.6,
)
def _(net: Any, x: torch.Tensor) -> Any:
    x.mul_(1.5)
    return Trunk.forward(net, x)


@runs("a dict and a list of the caller's that the forward adds to", call=lambda n: (({"x": drawn(n)}, [drawn(n)]), {}))
def _(net: Any, batch: dict[str, torch.Tensor], rest: list[torch.Tensor]) -> torch.Tensor:
    x = batch.pop("x")
    for n, block in enumerate(net.blocks):
        batch[str(n)] = x = block(x) + 0.1 * rest[-1]
        rest.append(x)
    return net.head(x)


# -- what needs no gradient is made late, of parts of the batch and of tables


def adapted() -> nn.Module:
    return Does(
        lambda net, x: net.block(x) + net.up(net.down(x)),
        block=Block().requires_grad_(False), down=nn.Linear(WIDTH, 4), up=nn.Linear(4, WIDTH),
    )  # fmt: skip


@runs(
    "adapters over a frozen embedding with rotary positions",
    call=lambda n: ((torch.arange(LENGTH).mul(3 + n).remainder(50),), {}),
    of=made_of(adapted),
    has={"table": lambda: nn.Embedding(50, WIDTH).requires_grad_(False)},
    room=0.3,
    stages=12,
)
def _(net: Any, ids: torch.Tensor) -> torch.Tensor:
    x = net.table(ids).requires_grad_(True)
    table = torch.arange(LENGTH)[:, None].float().mul(0.1).cos()
    for n, block in enumerate(net.blocks):
        x = x + torch.sin(block(x) * table.unsqueeze(0)[0]) * (1.0 if n % 2 else table[:, 0][:, None])
    return net.head(x)


@row("blocks in a tree over views of views of the batch", room=0.0, stages=12)
class Tree(Trunk):
    many = 7

    def of(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if 2 * n + 2 >= self.many:
            return self.blocks[n](x)
        half = len(x) // 2
        left, right = x[:half], x[half:]
        return self.blocks[n](self.of(left, 2 * n + 1) + self.of(right, 2 * n + 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.of(x, 0))


@runs("a part of a mask of the batch for each block", room=0.0, stages=12)
def _(net: Any, x: torch.Tensor) -> torch.Tensor:
    y, masks = x, (x > 0).view(4, 4, WIDTH)
    for n, block in enumerate(net.blocks):
        y = block(y) * masks[n].float().repeat(4, 1).add(1)
    return net.head(y)


# -- scripted parts


def with_scripted() -> nn.Module:
    after = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)))
    return Does(lambda net, x: net.block(net.after(x)), after=after, block=Block())


row(
    "scripted parts that are frozen in steps",
    lambda net, n: [p.requires_grad_(n % 2 == 0) for p in net.blocks[1].after.parameters()],
)(made_of(with_scripted))
# -- errors that the forward catches


class Caught(Trunk, k=int):
    """An operation that fails in some steps, with another in its place."""

    fails: tuple[int, ...] = (1, 3)

    def attempt(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        return x @ (torch.ones(3, 3) if fails else torch.eye(WIDTH))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        try:
            return self.attempt(y, self.k in self.fails and n % 2 == 1)
        except (RuntimeError, KeyError):
            return torch.tanh(y)


def factor(net: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
    return x @ torch.linalg.cholesky(x.t() @ x - torch.eye(WIDTH) * (1e3 if fails else -1.0)) * 0.1


class Fallible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        if fails:
            raise KeyError("fails")
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class UsedLater(Caught):
    """What was made for nothing when it was measured is used in later steps, beside an attempt that fails."""

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        made = torch.sin(x)
        for part in (0, 1):
            try:
                made = factor(self, x + part, self.k == 2 and part == 0)
            except RuntimeError:
                made = torch.tanh(x)
        return x + torch.tanh(made) if self.k else x * 1.5


def caught(name: str, of: type[Caught] = Caught, room: float = 0.0, **has: Any) -> None:
    row(f"an error that the forward catches, {name}", sets("k", lambda n: n), room=room)(type("Catches", (of,), has))


caught("of wrong shapes")
caught("of a custom Function", attempt=lambda net, x, fails: Fallible.apply(x * 0.1, fails))
caught("beside what was made for nothing before", of=UsedLater, room=0.6)
