"""More models whose behaviour changes between steps, or is odd in each: the second table of test_changing_models.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch
from changing_models import LENGTH, WIDTH, Block, Long, Trunk, drawn
from changing_models import batch as own_batch
from step_by_step import PATCH, Call, Row, error_of, nothing
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HERE = sys.modules[__name__]
WORLD: dict[str, Any] = {"n": 0, "seen": []}
ODD: list[Row] = []


def row(
    name: str, change: Callable[[Any, int], object] = nothing, call: Callable[[int], Call] = own_batch, **more: Any
) -> Any:
    """Enters a class of models (or what makes one) into the table."""

    def enter(make: Any) -> Any:
        ODD.append(Row(name, make, call, change, **more))
        return make

    return enter


@contextlib.contextmanager
def counted():
    WORLD["n"] += 1
    try:
        yield WORLD["n"]
    finally:
        WORLD["n"] += 1


@row(
    "a context manager of the user's own",
    lambda net, n: n == 0 and PATCH.setitem(WORLD, "n", 0),
    again=lambda net: WORLD.update(n=0),
)
class WithContext(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with counted() as k:
            return torch.sin(x) * (1 + 0.01 * k)


def pre_kwargs(net: Any, n: int) -> None:
    if n == 0:
        net.blocks[1].register_forward_pre_hook(
            lambda m, a, k: ((a[0] * (1.0 + 0.1 * net.steps),), k), with_kwargs=True
        )
    net.steps = n


row("a forward pre-hook with kwargs added", pre_kwargs, room=0.8)(Long)


class Keyworded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, bias: Any = None) -> torch.Tensor:
        x = self.block(x) * scale
        return x if bias is None else x + 0.1 * bias


@row("forward pre-hooks with kwargs that change them", lambda net, n: setattr(net, "k", 1.0 + 0.1 * n))
class KwHooks(Trunk):
    made_of = Keyworded
    k = 1.0

    def __init__(self) -> None:
        super().__init__()
        for b in self.blocks:
            b.register_forward_pre_hook(
                lambda m, a, kw: (a, {**kw, "scale": self.k, "bias": a[0].mean(1, keepdim=True)}), with_kwargs=True
            )
            b.register_forward_hook(lambda m, a, kw, out: torch.tanh(out * kw.get("scale", 1.0)), with_kwargs=True)


@row("a forward hook that is always called and keeps what it sees", again=lambda net: net.seen.clear())
class AlwaysCalled(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []
        self.blocks[2].register_forward_hook(
            lambda m, a, out: self.seen.append(float(out.detach().mean())), always_call=True
        )


@row(
    "a forward hook that keeps its output, in the loss",
    may_refuse="adds tensors of the graph",
    room=0.8,
    step=lambda run, net, call, n: _kept_step(run, net, call),
)
class KeepsByHook(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.kept = []
        self.blocks[1].register_forward_hook(lambda m, a, out: self.kept.append(out))


def _kept_step(run: nn.Module, net: Any, call: Call) -> torch.Tensor:
    out = run(*call[0])
    loss = error_of(out) + sum(k.square().mean() for k in net.kept)
    net.kept.clear()
    loss.backward()
    return loss


class Sym(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.scale + 0.1 * w.roll(1, 0)


@row(
    "a parametrization whose factor changes",
    lambda net, n: [setattr(b.up.parametrizations.weight[0], "scale", 1 + 0.1 * n) for b in net.blocks],
)
class Parametrized(Trunk):
    def __init__(self) -> None:
        super().__init__()
        for b in self.blocks:
            nn.utils.parametrize.register_parametrization(b.up, "weight", Sym())


@row("a parametrization within cached()")
class CachedParam(Parametrized):
    def forward(self, x: torch.Tensor) -> Any:
        with nn.utils.parametrize.cached():
            for b in self.blocks:
                x = b(b(x))
            return self.head(x)


@row("weight norm of the older form")
class OldWN(Trunk):
    def __init__(self) -> None:
        super().__init__()
        for b in self.blocks:
            nn.utils.weight_norm(b.up)


@row("spectral norm of the older form")
class OldSN(Trunk):
    def __init__(self) -> None:
        super().__init__()
        for b in self.blocks:
            nn.utils.spectral_norm(b.up)


def removed_norm(net: Any, n: int) -> None:
    if n == 2:
        for b in net.blocks:
            nn.utils.remove_weight_norm(b.up)


row("weight norm of the older form removed", removed_norm, room=0.6)(OldWN)


@functools.lru_cache(None)
def table(n: int) -> torch.Tensor:
    return torch.linspace(0.5, 1, n)


@row("a table behind lru_cache")
class Lru(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * table(x.shape[1])


@row(
    "a cache of a no_grad result by key",
    lambda net, n: setattr(net, "key", n // 2),
    again=lambda net: net.cache.clear(),
)
class KeyCache(Trunk):
    key = 0

    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        if (self.key, n) not in self.cache:
            with torch.no_grad():
                self.cache[self.key, n] = x.mean(0) * 0.1
        return torch.sin(x + self.cache[self.key, n])


@row("chunks changed in place")
class Chunks(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 1.0
        y[:, WIDTH // 2 :].mul_(1.1).tanh_()
        return torch.sin(y)


@row("a view of a view changed in place after a use")
class ViewView(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x) + 0.0
        z = y.view(-1, 2, WIDTH // 2)
        w = z[:, 0]
        u = w * 2
        w.add_(0.5)
        return y + F.pad(u, (0, WIDTH // 2))


@row("as_strided windows")
class Strided(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return (
            torch.tanh(x)
            + x.contiguous()
            .as_strided((LENGTH, WIDTH), (WIDTH, 1))
            .unfold(1, 4, 2)
            .mean(2)
            .repeat_interleave(2, 1)[:, :1]
        )


@row("a buffer that keeps a queue, written by index")
class Queue(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.no_grad():
            self.queue[self.at % 8] = x.detach().mean(0)
            self.at += 1
        return torch.sin(x + (x @ self.queue.clone().T) @ self.queue.clone() * 0.01)


@row("out= given")
class Out(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(LENGTH, WIDTH), persistent=False)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.no_grad():
            torch.mul(x, 0.1, out=self.room)
        return torch.sin(x) + self.room.clone()


@row("complex numbers")
class Complex(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        z = torch.fft.rfft(x)
        z = z * torch.polar(torch.ones_like(z.real), z.real * 0.1)
        return torch.tanh(x + torch.fft.irfft(z.conj() * z.abs(), n=WIDTH) * 0.1)


@row("view_as_real and conj changed in place")
class Conj(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        z = torch.complex(x, x.flip(1))
        v = torch.view_as_real(z).clone()
        v[..., 1] *= -0.5
        return x + (torch.view_as_complex(v).conj().imag * torch.resolve_conj(z.conj()).real) * 0.1


@row(
    "autocast of another type in each step",
    lambda net, n: setattr(net, "kind", (torch.bfloat16, torch.float16)[n % 2]),
    room=0.6,
)
class Kinds(Trunk):
    kind = torch.bfloat16

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autocast("cpu", self.kind):
            x = torch.tanh(self.blocks[n].up(x))[:, :WIDTH]
        return x.float()


@row(
    "a weight that an autocast region uses twice, in steps of other sizes",
    call=lambda n: ((drawn(n, 16 - 2 * n, WIDTH),), {}),
    room=0.6,
)
class TwiceCast(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x).float()


@row("autocast switched off within autocast", step=lambda run, net, call, n: _auto(run, call), room=0.8)
class OffIn(Long):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.sin(x.float())


def _auto(run: nn.Module, call: Call) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*call[0])
    loss = error_of(out)
    loss.backward()
    return loss


@row("custom_fwd casts")
class CustomFwd(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return Cast.apply(x)


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos()


@row("straight through")
class STE(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        q = (x * 4).round() / 4
        return x + (q - x).detach()


@row("set_grad_enabled by a decorator", lambda net, n: setattr(net, "m", 0.9 - 0.1 * n))
class Deco(Trunk):
    m = 0.9

    @torch.no_grad()
    def target(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.m

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.tanh(x + self.target(x))


@row("requires_grad_ on what was made within no_grad")
class ReqIn(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.no_grad():
            y = x * 0.5
        y.requires_grad_()
        return torch.sin(x) * (1 + torch.tanh(y))


@row("a stop by detach_ in some steps", lambda net, n: setattr(net, "stop", n % 2 == 1), room=0.6)
class DetachIn(Trunk):
    stop = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 1.5
        if self.stop and n == 1:
            y = y.detach_()
        return torch.sin(y) + x


@row("inference_mode inside")
class Inf(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.inference_mode():
            k = float(x.mean())
        return torch.sin(x) + k


class Stateful(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, level: Any) -> Any:
        ctx.level, ctx.shape = level, x.shape
        y = x * level
        ctx.y = y.detach()
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * ctx.level + 0.01 * ctx.y * x, None


@row("a function of autograd with state on ctx", lambda net, n: setattr(net, "level", 1 + 0.1 * n), room=0.5)
class StatefulFn(Trunk):
    level = 1.0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return Stateful.apply(x, self.level)


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, k: int) -> Any:
        return x.sin() * k, x.argsort(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.k = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, _):
        x, i = ctx.saved_tensors
        return g * x.cos() * ctx.k + 0 * i, None


@row("a function of autograd with setup_context and two outputs", lambda net, n: setattr(net, "k", 1 + n))
class NewFn(Trunk):
    k = 1

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y, i = NewStyle.apply(x, self.k)
        return y + x.gather(1, i) * 0.1


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2


@row("a function of autograd that changes its input in place")
class DirtyFn(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(Dirty.apply(x * 0.5))


class DirtyBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, b: Any) -> Any:
        b += 1
        ctx.mark_dirty(b) if False else None
        ctx.b = float(b)
        return x * ctx.b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.b, None


@row("a function of autograd that counts in a buffer", may_refuse="changed in place a tensor", room=0.5)
class DirtyBuf(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(DirtyBuffer.apply(x, self.count) * 0.1)


@row("a function of autograd given a list of tensors")
class Nested(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return Sums.apply(2, *x.chunk(2, 1))


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Any, *xs: Any) -> Any:
        ctx.save_for_backward(*xs)
        return torch.cat([x.exp() for x in xs], 1) * 0.1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return None, *(p * x.exp() * 0.1 for p, x in zip(g.chunk(2, 1), ctx.saved_tensors, strict=True))


@row("vmap of a function in the forward", may_refuse="torch.func")
class Vmapped(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.func.vmap(lambda r: torch.sin(r) * r.mean())(x)


class GradInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.block(x) + torch.func.grad(lambda y: (y**3).sum())(x) * 0.01 * self.calls


@row("torch.func.grad in a block that counts", may_refuse="torch.func|differentiat", room=0.6)
class FuncGrad(Trunk):
    made_of = GradInside


class VmapBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.calls = 0
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.n += 1
        return torch.func.vmap(lambda r: torch.sin(r) * (1 + 0.1 * self.calls))(self.block(x)) * (1 + self.n)


@row("vmap in a block that counts", room=0.6, stages=8)
class VmapCounts(Trunk):
    made_of = VmapBlock


@row("functional_call of a block with stacked weights")
class Stacked(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        p = {k: v * 0.5 for k, v in self.blocks[n].named_parameters()}
        return torch.func.functional_call(self.blocks[n], p, (x,))


@row("jvp", may_refuse="torch.func|differentiat|forward mode|forward AD", room=0.6)
class Jvp(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1] + x


def numbers():
    k = 0
    while True:
        k += 1
        yield 1 + 0.01 * k


@row(
    "a generator of the world",
    again=lambda net: WORLD.update(gen=numbers()),
    change=lambda net, n: n == 0 and WORLD.update(gen=numbers()),
)
class Gen(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x) * next(WORLD["gen"])


@row("a thread that computes a factor")
class Thread(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        box = []
        t = threading.Thread(target=lambda: box.append(float(torch.tensor([1.0, 2.0]).sum())))
        t.start()
        t.join()
        return torch.sin(x) * box[0] * 0.4


@row("a thread that runs a part of the forward", may_refuse="thread|cannot see|outside of torch", room=0.6)
class Thread2(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        box = []
        t = threading.Thread(target=lambda: box.append(torch.sin(x) * 0.5))
        t.start()
        t.join()
        return x + box[0]


def deep(net: Any, n: int) -> None:
    if n == 2:
        net.blocks[1] = copy.deepcopy(net.blocks[1])


row("a block deep-copied between steps", deep)(Trunk)


def deep_all(net: Any, n: int) -> None:
    global COPY
    COPY = copy.deepcopy(net)


row("the model deep-copied between steps", deep_all)(Trunk)


def loaded(net: Any, n: int) -> None:
    if n == 2:
        net.load_state_dict({k: v * 0.9 for k, v in net.state_dict().items()})


row("a state_dict loaded between steps", loaded)(Trunk)


def loaded_assign(net: Any, n: int) -> None:
    if n == 2:
        net.load_state_dict({k: (v * 0.9).clone() for k, v in net.state_dict().items()}, assign=True)


row("a state_dict assigned between steps", loaded_assign)(Trunk)


def pickled(net: Any, n: int) -> None:
    buf = io.BytesIO()
    torch.save(net.state_dict(), buf)


row("a state_dict saved between steps", pickled)(Trunk)


def initialised(net: Any, n: int) -> None:
    if n == 3:
        [nn.init.constant_(b.down.weight, 0.01) for b in net.blocks]


row("weights set anew between steps", initialised)(Trunk)


@row("hooks on tensors that change gradients by a count", again=lambda net: setattr(net, "count", 0))
class HookCount(Trunk):
    count = 0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)

        def hook(g: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return g * (1 + 0.01 * self.count)

        y.register_hook(hook)
        return y


@row("retain_grad in the forward", step=lambda run, net, call, n: _retained(run, net, call), room=0.8)
class Retain(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        if n == 1:
            y.retain_grad()
            self.__dict__["kept"] = y
        return y


def _retained(run: nn.Module, net: Any, call: Call) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward()
    with torch.no_grad():
        net.head.bias.grad += net.kept.grad.mean()
    del net.__dict__["kept"]
    return loss


@row("register_multi_grad_hook in the forward", room=0.6)
class Multi(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        a, b = torch.sin(x), torch.cos(x)
        torch.autograd.graph.register_multi_grad_hook(
            (a, b), lambda gs: WORLD["seen"].append(sum(float(g.sum()) for g in gs))
        )
        return a + b


@row("hooks on nodes")
class Nodes(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        y.grad_fn.register_prehook(lambda gs: (gs[0] * 1.1,))
        return y


@row("a hook on the whole model's gradient")
class HookedWhole(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else g * 2 for g in gi))
        self.blocks[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.7,))


@row("a post-accumulate hook that updates in backward", room=0.6)
class PostAcc(Trunk):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])


@row(
    "a sparse embedding",
    call=lambda n: ((torch.randint(0, 32, (LENGTH,), generator=torch.Generator().manual_seed(n)),), {}),
)
class Sparse(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, WIDTH, sparse=True)
        self.emb.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_dense()))

    def forward(self, i: torch.Tensor) -> Any:
        return super().forward(self.emb(i))


@row(
    "an embedding bag",
    call=lambda n: ((torch.randint(0, 32, (LENGTH * 3,), generator=torch.Generator().manual_seed(n)),), {}),
)
class Bag(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(32, WIDTH, mode="mean")

    def forward(self, i: torch.Tensor) -> Any:
        return super().forward(self.emb(i, torch.arange(0, LENGTH * 3, 3)))


@row("nested tensors inside", may_refuse="NestedTensor|nested", room=0.6)
class NestedT(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        nt = torch.nested.as_nested_tensor([x[:4], x[4:]], layout=torch.jagged)
        return torch.cat([t * 1.1 for t in nt.unbind()])


@row("a sparse matrix inside", may_refuse="sparse|storage", room=0.6)
class SpMM(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(LENGTH).to_sparse(), x) * 1.01


@row(
    "checkpoint with a generator's preserve",
    again=lambda net: WORLD.update(n=0),
    change=lambda net, n: n == 0 and WORLD.update(n=0),
)
class Ckpt(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def piece(self, x: torch.Tensor, k: float) -> torch.Tensor:
        WORLD["n"] += 0
        return self.drop(torch.sin(x * k))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return checkpoint(self.piece, x, 1.0 + 0.1 * n, use_reentrant=False)


@row("checkpoint_sequential")
class CkptSeq(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.utils.checkpoint.checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False))


@row("selective checkpoint contexts")
class Selective(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts as c

        return checkpoint(
            torch.tanh, x, use_reentrant=False, context_fn=functools.partial(c, [torch.ops.aten.mm.default])
        )


@row("a property that counts", again=lambda net: setattr(net, "reads", 0))
class Prop(Trunk):
    reads = 0

    @property
    def scale(self) -> float:
        self.reads += 1
        return 1 + 0.01 * self.reads

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x) * self.scale


@row("a module made in the forward")
class MadeIn(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return nn.LayerNorm(WIDTH)(x)


@row("a module called twice with state")
class TwiceState(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.bn(self.bn(x)) + x


@row(
    "a block called by its forward",
)
class ByForward(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        for b in self.blocks:
            x = b.forward(x)
        return self.head(x)


@row("outputs in a dict with a non tensor", room=0.6)
class DictOut(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        return {"a": super().forward(x), "n": 3, "b": {"c": x.sum()}}


@row("an input returned as it is", room=0.6)
class Same(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


@row(
    "an input that needs a gradient and is changed in place",
    may_refuse="in-place operation",
    call=lambda n: ((drawn(n).requires_grad_() * 1.0,), {}),
    room=0.6,
)
class GradIn(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        x.mul_(1.5)
        return super().forward(x)


@row(
    "torch.where over nan",
)
class Where(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.where(x > 0, x.clamp(min=1e-3).sqrt(), x)


@row("dtype by a default", lambda net, n: setattr(net, "t", (torch.float32, torch.float64)[n % 2]), room=0.6)
class Dt(Trunk):
    t = torch.float32

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x.to(self.t)).float()


@row(
    "rnn",
)
class Rnn(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.rnn(x.unsqueeze(1))[0].squeeze(1) + x


@row("a hidden state carried between steps", again=lambda net: setattr(net, "h", None), room=0.8)
class Carried(Trunk):
    h = None

    def forward(self, x: torch.Tensor) -> Any:
        self.rnn_out = None
        h = x.new_zeros(WIDTH) if self.h is None else self.h
        for b in self.blocks:
            x = b(x + h)
        self.h = x.detach().mean(0)
        return self.head(x)


@row(
    "multihead attention",
)
class Mha(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.att(x, x, x, need_weights=n == 1)[0] + x


@row(
    "an encoder layer of torch",
)
class Enc(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.enc(x.unsqueeze(0)).squeeze(0)


@row("MoE: top-2 with scatter", lambda net, n: n == 0 and WORLD.update(n=0), room=0.6)
class Moe(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.ModuleList(MoE() for _ in range(4))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.moe[n](x)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.ex = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        WORLD["n"] += 1
        w, i = (self.gate(x) + 0.1 * torch.randn(4)).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(4):
            r, k = torch.where(i == e)
            self.load[e] += len(r)
            if r.numel():
                out.index_add_(0, r, self.ex[e](x[r]) * w[r, k, None])
        return x + out * (1 + 0.01 * WORLD["n"])


@row("a flag that only the backward reads", step=lambda run, net, call, n: _flagged(run, net, call, n))
class BackFlag(Trunk):
    flag = 1.0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        y.register_hook(lambda g: g * self.flag)
        return y


def _flagged(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    net.flag = 1.0
    loss = error_of(run(*call[0]))
    net.flag = 1 + 0.1 * n
    loss.backward()
    return loss


@row("gradients clipped and zeroed by set_to_none in the step", step=lambda run, net, call, n: _clip(run, net, call))
class Clip(Trunk):
    pass


def _clip(run: nn.Module, net: Any, call: Call) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return loss


@row("a buffer of another dtype assigned", lambda net, n: n == 2 and setattr(net, "b", net.b.double()), room=0.6)
class BufDtype(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(WIDTH))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * self.b.float()


@row("numpy in the midst", room=0.6)
class Np(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        k = torch.from_numpy(numpy.cumsum(x.detach().numpy(), 1) * 0.01)
        return torch.sin(x) + k


@row(
    "a list of views",
)
class Views(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        vs = [x[:, i] for i in range(WIDTH)]
        vs[0] = vs[0] * 2
        return torch.tanh(torch.stack(vs, 1))


TENSOR = torch.ones(())


@row(
    "a tensor of a global changed in place",
    lambda net, n: n == 0 and TENSOR.fill_(1.0),
    again=lambda net: TENSOR.fill_(1.0),
    room=0.0,
)
class G(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        TENSOR.add_(0.1)
        return torch.sin(x) * TENSOR.clone()


@row("an attribute tensor changed in place", room=0.0, again=lambda net: net.t.fill_(1.0))
class A(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.t = torch.ones(())

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.t.add_(0.1)
        return torch.sin(x) * self.t.clone()
