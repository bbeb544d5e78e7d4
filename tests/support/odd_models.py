"""More models whose behaviour changes between steps, or is odd in each: the rest of the table of
test_changing_models.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from changing_models import numbers
from step_by_step import PATCH, Call, error_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from trunks import LENGTH, WIDTH, Block, Long, Trunk, along, at, drawn, made_of, row, sets

WORLD: dict[str, Any] = {"n": 0, "seen": []}


@contextlib.contextmanager
def counted() -> Iterator[int]:
    WORLD["n"] += 1
    try:
        yield WORLD["n"]
    finally:
        WORLD["n"] += 1


@row(
    "a context manager of the user's own",
    at(0, lambda net: PATCH.setitem(WORLD, "n", 0)),
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


@row("forward pre-hooks with kwargs that change them", sets("k", lambda n: 1.0 + 0.1 * n))
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
class AlwaysCalled(Trunk, seen=list):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_hook(
            lambda m, a, out: self.seen.append(float(out.detach().mean())), always_call=True
        )


def kept_step(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    out = run(*call[0])
    loss = error_of(out) + sum(k.square().mean() for k in net.kept)
    net.kept.clear()
    loss.backward()
    return loss


@row(
    "a forward hook that keeps its output, in the loss",
    may_refuse="adds tensors of the graph",
    room=0.8,
    step=kept_step,
)
class KeepsByHook(Trunk, kept=list):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(lambda m, a, out: self.kept.append(out))


class Symmetric(nn.Module):
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
            nn.utils.parametrize.register_parametrization(b.up, "weight", Symmetric())


@row("a parametrization within cached()")
class CachedParametrization(Parametrized):
    def forward(self, x: torch.Tensor) -> Any:
        with nn.utils.parametrize.cached():
            for b in self.blocks:
                x = b(b(x))
            return self.head(x)


def with_older(norm: Any) -> nn.Module:
    net = Trunk()
    for b in net.blocks:
        norm(b.up)
    return net


def weight_norm_removed(net: Any) -> None:
    for b in net.blocks:
        nn.utils.remove_weight_norm(b.up)


row("weight norm of the older form")(lambda: with_older(nn.utils.weight_norm))
row("spectral norm of the older form")(lambda: with_older(nn.utils.spectral_norm))
row("weight norm of the older form removed", at(2, weight_norm_removed), room=0.6)(
    lambda: with_older(nn.utils.weight_norm)
)


@functools.lru_cache(None)
def table(n: int) -> torch.Tensor:
    return torch.linspace(0.5, 1, n)


row("a table behind lru_cache")(along(lambda net, x, n: x * table(x.shape[1])))


@row("a cache of a no_grad result by key", sets("key", lambda n: n // 2), again=lambda net: net.cache.clear())
class KeyCache(Trunk, cache=dict):
    key = 0

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
class ViewOfView(Trunk):
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
        windows = x.contiguous().as_strided((LENGTH, WIDTH), (WIDTH, 1)).unfold(1, 4, 2)
        return torch.tanh(x) + windows.mean(2).repeat_interleave(2, 1)[:, :1]


@row("a buffer that keeps a queue, written by index")
class Queue(
    Trunk,
    queue=lambda: nn.Buffer(torch.zeros(8, WIDTH)),
    at=lambda: nn.Buffer(torch.zeros((), dtype=torch.long)),
):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.no_grad():
            self.queue[self.at % 8] = x.detach().mean(0)
            self.at += 1
        return torch.sin(x + (x @ self.queue.clone().T) @ self.queue.clone() * 0.01)


@row("out= given")
class Out(Trunk, room=lambda: nn.Buffer(torch.zeros(LENGTH, WIDTH), persistent=False)):
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


# -- types, and what is not differentiated


@row(
    "autocast of another type in each step",
    sets("kind", lambda n: (torch.bfloat16, torch.float16)[n % 2]),
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


def under_autocast(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*call[0])
    loss = error_of(out)
    loss.backward()
    return loss


@row("autocast switched off within autocast", step=under_autocast, room=0.8)
class OffIn(Long):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.sin(x.float())


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


@row("custom_fwd casts")
class CustomFwd(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return Cast.apply(x)


@row("straight through")
class StraightThrough(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        q = (x * 4).round() / 4
        return x + (q - x).detach()


@row("set_grad_enabled by a decorator", sets("m", lambda n: 0.9 - 0.1 * n))
class Decorated(Trunk):
    m = 0.9

    @torch.no_grad()
    def target(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.m

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.tanh(x + self.target(x))


@row("requires_grad_ on what was made within no_grad")
class RequiresInside(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.no_grad():
            y = x * 0.5
        y.requires_grad_()
        return torch.sin(x) * (1 + torch.tanh(y))


@row("a stop by detach_ in some steps", sets("stop", lambda n: n % 2 == 1), room=0.6)
class DetachesInside(Trunk):
    stop = False

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 1.5
        if self.stop and n == 1:
            y = y.detach_()
        return torch.sin(y) + x


@row("inference_mode inside")
class Inference(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with torch.inference_mode():
            k = float(x.mean())
        return torch.sin(x) + k


# -- functions of autograd, and of torch.func


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
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        x, i = ctx.saved_tensors
        return g * x.cos() * ctx.k + 0 * i, None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * 2


class DirtyBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, b: Any) -> Any:
        b += 1
        ctx.b = float(b)
        return x * ctx.b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.b, None


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Any, *xs: Any) -> Any:
        ctx.save_for_backward(*xs)
        return torch.cat([x.exp() for x in xs], 1) * 0.1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return None, *(p * x.exp() * 0.1 for p, x in zip(g.chunk(2, 1), ctx.saved_tensors, strict=True))


row("a function of autograd with state on ctx", sets("level", lambda n: 1 + 0.1 * n), room=0.5)(
    along(lambda net, x, n: Stateful.apply(x, net.level), level=lambda: 1.0)
)


@row("a function of autograd with setup_context and two outputs", sets("k", lambda n: 1 + n))
class OfNewStyle(Trunk):
    k = 1

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y, i = NewStyle.apply(x, self.k)
        return y + x.gather(1, i) * 0.1


row("a function of autograd that changes its input in place")(along(lambda net, x, n: torch.sin(Dirty.apply(x * 0.5))))
row("a function of autograd that counts in a buffer", may_refuse="changed in place a tensor", room=0.5)(
    along(lambda net, x, n: torch.sin(DirtyBuffer.apply(x, net.count) * 0.1), count=lambda: nn.Buffer(torch.ones(())))
)
row("a function of autograd given a list of tensors")(along(lambda net, x, n: Sums.apply(2, *x.chunk(2, 1))))
row("vmap of a function in the forward", may_refuse="torch.func")(
    along(lambda net, x, n: torch.func.vmap(lambda r: torch.sin(r) * r.mean())(x))
)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.calls = 0


class GradInside(Calls):
    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.block(x) + torch.func.grad(lambda y: (y**3).sum())(x) * 0.01 * self.calls


class VmapInside(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.n += 1
        return torch.func.vmap(lambda r: torch.sin(r) * (1 + 0.1 * self.calls))(self.block(x)) * (1 + self.n)


row("torch.func.grad in a block that counts", may_refuse="torch.func|differentiat", room=0.6)(made_of(GradInside))
row("vmap in a block that counts", room=0.6, stages=8)(made_of(VmapInside))


@row("functional_call of a block with stacked weights")
class Stacked(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        p = {k: v * 0.5 for k, v in self.blocks[n].named_parameters()}
        return torch.func.functional_call(self.blocks[n], p, (x,))


row("jvp", may_refuse="torch.func|differentiat|forward mode|forward AD", room=0.6)(
    along(lambda net, x, n: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1] + x)
)


# -- the world


row(
    "a generator of the world",
    at(0, lambda net: WORLD.update(gen=numbers())),
    again=lambda net: WORLD.update(gen=numbers()),
)(along(lambda net, x, n: torch.sin(x) * next(WORLD["gen"])))


def in_thread(what: Any) -> Any:
    box: list[Any] = []
    t = threading.Thread(target=lambda: box.append(what()))
    t.start()
    t.join()
    return box[0]


row("a thread that computes a factor")(
    along(lambda net, x, n: torch.sin(x) * in_thread(lambda: float(torch.tensor([1.0, 2.0]).sum())) * 0.4)
)
row("a thread that runs a part of the forward", may_refuse="thread|cannot see|outside of torch", room=0.6)(
    along(lambda net, x, n: x + in_thread(lambda: torch.sin(x) * 0.5))
)


def deep_copied(net: Any) -> None:
    net.blocks[1] = copy.deepcopy(net.blocks[1])


def copied_whole(net: Any, n: int) -> None:
    WORLD["copy"] = copy.deepcopy(net)


def assigned(net: Any) -> None:
    net.load_state_dict({k: (v * 0.9).clone() for k, v in net.state_dict().items()}, assign=True)


row("a block deep-copied between steps", at(2, deep_copied))(Trunk)
row("the model deep-copied between steps", copied_whole)(Trunk)
row("a state_dict loaded between steps", at(
    2, lambda net: net.load_state_dict({k: v * 0.9 for k, v in net.state_dict().items()})
))(Trunk)  # fmt: skip
row("a state_dict assigned between steps", at(2, assigned))(Trunk)
row("a state_dict saved between steps", lambda net, n: torch.save(net.state_dict(), io.BytesIO()))(Trunk)
row("weights set anew between steps", at(
    3, lambda net: [nn.init.constant_(b.down.weight, 0.01) for b in net.blocks]
))(Trunk)  # fmt: skip


# -- hooks


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


def retained(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward()
    with torch.no_grad():
        net.head.bias.grad += net.kept.grad.mean()
    del net.__dict__["kept"]
    return loss


@row("retain_grad in the forward", step=retained, room=0.8)
class Retain(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        if n == 1:
            y.retain_grad()
            self.__dict__["kept"] = y
        return y


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
class PostAccumulate(Trunk):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])


# -- sparse, nested, checkpointed


def words(n: int, many: int = LENGTH) -> Call:
    return (torch.randint(0, 32, (many,), generator=torch.Generator().manual_seed(n)),), {}


@row("a sparse embedding", call=words)
class Sparse(Trunk, emb=lambda: nn.Embedding(32, WIDTH, sparse=True)):
    def __init__(self) -> None:
        super().__init__()
        self.emb.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_dense()))

    def forward(self, i: torch.Tensor) -> Any:
        return super().forward(self.emb(i))


@row("an embedding bag", call=lambda n: words(n, LENGTH * 3))
class Bag(Trunk, emb=lambda: nn.EmbeddingBag(32, WIDTH, mode="mean")):
    def forward(self, i: torch.Tensor) -> Any:
        return super().forward(self.emb(i, torch.arange(0, LENGTH * 3, 3)))


@row("nested tensors inside", may_refuse="NestedTensor|nested", room=0.6)
class Nested(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        nt = torch.nested.as_nested_tensor([x[:4], x[4:]], layout=torch.jagged)
        return torch.cat([t * 1.1 for t in nt.unbind()])


row("a sparse matrix inside", may_refuse="sparse|storage", room=0.6)(
    along(lambda net, x, n: torch.sparse.mm(torch.eye(LENGTH).to_sparse(), x) * 1.01)
)


@row("checkpoint with a generator's preserve")
class Checkpoints(Trunk, drop=lambda: nn.Dropout(0.2)):
    def piece(self, x: torch.Tensor, k: float) -> torch.Tensor:
        return self.drop(torch.sin(x * k))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return checkpoint(self.piece, x, 1.0 + 0.1 * n, use_reentrant=False)


@row("checkpoint_sequential")
class CheckpointsInParts(Trunk):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False))


selective = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
row("selective checkpoint contexts")(
    along(lambda net, x, n: checkpoint(torch.tanh, x, use_reentrant=False, context_fn=selective))
)


# -- modules


@row("a property that counts", again=lambda net: setattr(net, "reads", 0))
class Property(Trunk):
    reads = 0

    @property
    def scale(self) -> float:
        self.reads += 1
        return 1 + 0.01 * self.reads

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.sin(x) * self.scale


row("a module made in the forward")(along(lambda net, x, n: nn.LayerNorm(WIDTH)(x)))
row("a module called twice with state")(
    along(lambda net, x, n: net.bn(net.bn(x)) + x, bn=lambda: nn.BatchNorm1d(WIDTH))
)


@row("a block called by its forward")
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


row("torch.where over nan")(along(lambda net, x, n: torch.where(x > 0, x.clamp(min=1e-3).sqrt(), x)))
row("dtype by a default", sets("t", lambda n: (torch.float32, torch.float64)[n % 2]), room=0.6)(
    along(lambda net, x, n: torch.sin(x.to(net.t)).float(), t=lambda: torch.float32)
)
row("rnn")(
    along(
        lambda net, x, n: net.rnn(x.unsqueeze(1))[0].squeeze(1) + x,
        rnn=lambda: nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2),
    )
)


@row("a hidden state carried between steps", again=lambda net: setattr(net, "h", None), room=0.8)
class Carried(Trunk):
    h = None

    def forward(self, x: torch.Tensor) -> Any:
        h = x.new_zeros(WIDTH) if self.h is None else self.h
        for b in self.blocks:
            x = b(x + h)
        self.h = x.detach().mean(0)
        return self.head(x)


row("multihead attention")(
    along(
        lambda net, x, n: net.att(x, x, x, need_weights=n == 1)[0] + x,
        att=lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.1),
    )
)
row("an encoder layer of torch")(
    along(
        lambda net, x, n: net.enc(x.unsqueeze(0)).squeeze(0),
        enc=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True),
    )
)


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


row("MoE: top-2 with scatter", at(0, lambda net: WORLD.update(n=0)), room=0.6)(
    along(lambda net, x, n: net.moe[n](x), moe=lambda: nn.ModuleList(MoE() for _ in range(4)))
)


def flagged(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    net.flag = 1.0
    loss = error_of(run(*call[0]))
    net.flag = 1 + 0.1 * n
    loss.backward()
    return loss


@row("a flag that only the backward reads", step=flagged)
class BackwardFlag(Trunk):
    flag = 1.0

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.sin(x)
        y.register_hook(lambda g: g * self.flag)
        return y


def clipped(run: nn.Module, net: Any, call: Call, n: int) -> torch.Tensor:
    loss = error_of(run(*call[0]))
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return loss


row("gradients clipped and zeroed by set_to_none in the step", step=clipped)(Trunk)
row("a buffer of another dtype assigned", at(2, lambda net: setattr(net, "b", net.b.double())), room=0.6)(
    along(lambda net, x, n: x * net.b.float(), b=lambda: nn.Buffer(torch.ones(WIDTH)))
)
row("numpy in the midst", room=0.6)(
    along(lambda net, x, n: torch.sin(x) + torch.from_numpy(numpy.cumsum(x.detach().numpy(), 1) * 0.01))
)


@row("a list of views")
class Views(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        vs = [x[:, i] for i in range(WIDTH)]
        vs[0] = vs[0] * 2
        return torch.tanh(torch.stack(vs, 1))


TENSOR = torch.ones(())


@row(
    "a tensor of a global changed in place",
    at(0, lambda net: TENSOR.fill_(1.0)),
    again=lambda net: TENSOR.fill_(1.0),
    room=0.0,
)
class OfGlobal(Trunk):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        TENSOR.add_(0.1)
        return torch.sin(x) * TENSOR.clone()


@row("an attribute tensor changed in place", room=0.0, again=lambda net: net.t.fill_(1.0))
class OfAttribute(Trunk, t=lambda: torch.ones(())):
    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.t.add_(0.1)
        return torch.sin(x) * self.t.clone()
