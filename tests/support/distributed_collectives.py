"""Run by `ranks`: a few steps of models whose own code communicates, with and without rotoff; prints lines that
`test_distributed` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from distributed_tensor_parallel import compared
from models import Does
from ranks import say
from step_by_step import works
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel

WIDTH, HEADS = 32, 4


class Ring(torch.autograd.Function):
    """Keys and values of all processes, passed on around a ring."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = {rank: part.contiguous()}
        for step in range(1, ranks):
            arriving = torch.empty_like(part)
            sent = dist.isend(parts[(rank - step + 1) % ranks], (rank + 1) % ranks)
            dist.irecv(arriving, (rank - 1) % ranks).wait()
            sent.wait()
            parts[(rank - step) % ranks] = arriving
        return torch.cat([parts[n] for n in range(ranks)], 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(gradient.chunk(dist.get_world_size(), 1))
        dist.all_reduce(parts)
        return parts[dist.get_rank()]


def functionally(part: torch.Tensor) -> torch.Tensor:
    whole = functional.all_gather_tensor_autograd(part.contiguous(), 0, dist.group.WORLD)
    return torch.cat(whole.chunk(dist.get_world_size(), 0), 1)


GATHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda part: torch.cat(all_gather(part), 1),
    "functional": functionally,
    "ring": Ring.apply,
}


def gathered_attention(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a part of the sequence on all of it (context parallel)."""
    q, k, v = net.qkv(net.norm(x)).chunk(3, -1)
    k, v = GATHERS[net.kind](torch.cat((k, v), -1)).chunk(2, -1)
    return attended(net, x, (q, k, v), False)


def ringed_attention(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a part of the sequence, which ``context_parallel`` makes attention on all of it."""
    return attended(net, x, net.qkv(net.norm(x)).chunk(3, -1), True)


def attended(net: Any, x: torch.Tensor, parts: Any, causal: bool) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
    x = x + net.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))
    return x + net.mlp(x)


def centred(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Less the mean over all processes, which no gradient flows through."""
    mean = x.detach().mean((0, 1))
    if net.kind == "reduced later":
        dist.all_reduce(mean, async_op=True).wait()
    elif net.kind == "gathered":
        parts = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mean)
        mean = torch.stack(parts).sum(0)
    elif net.kind == "exchanged":
        other = 1 - dist.get_rank()
        sent, arriving = dist.isend(mean, other), torch.empty_like(mean)
        dist.recv(arriving, other)
        sent.wait()
        mean = mean + arriving
    else:
        dist.all_reduce(mean)
    return x + net.mlp(x - mean)


def attend(q: torch.Tensor, k: torch.Tensor, scale: float | None, is_causal: bool) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")) if is_causal else scores


def efficient(q, k, v, bias, lse, dropout_p=0.0, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    scores = attend(q, k, scale, is_causal)
    total, none = scores.logsumexp(-1), torch.zeros((), dtype=torch.int64)
    return (scores - total[..., None]).exp() @ v, total, none, none


def efficient_backward(grad, q, k, v, bias, out, total, *_, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    p = (attend(q, k, scale, is_causal) - total[..., None]).exp()
    slope = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * (scale or q.shape[-1] ** -0.5)
    return slope @ k, slope.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad, None


def scaled_dot_product_attention(query, key, value, is_causal=False):  # type: ignore[no-untyped-def]
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal)[0]


@contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Within, attention on the CPU calls an operation that ``context_parallel`` knows, of which PyTorch has kernels for
    CUDA alone."""
    library, own = torch.library.Library("aten", "IMPL"), F.scaled_dot_product_attention
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own
        library._destroy()


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    does = ringed_attention if kind.startswith("context") else gathered_attention if kind in GATHERS else centred

    def block() -> nn.Module:
        mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        attention = {"norm": nn.LayerNorm(WIDTH), "qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}
        return Does(does, kind=kind, mlp=mlp, **({} if does is centred else attention))

    return nn.Sequential(*(block() for _ in range(5)), nn.Linear(WIDTH, 8))


def main(kind: str, mode: str = "") -> None:
    """kind: how the model communicates; alone: each process has a plan of its own, in a mode of its own."""
    kind = kind.replace("_", " ")
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    if not kind.startswith("context"):
        return tell(kind, mode, x)
    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    with kernels_of_cuda(), context_parallel(mesh, buffers=[whole], buffer_seq_dims=[1]):
        tell(kind, mode, whole)


def tell(kind: str, mode: str, x: torch.Tensor) -> None:
    alone = kind.endswith("alone")
    mode = ("remat", "offload")[dist.get_rank()] if alone else mode
    equal, planned = compared(partial(net, kind), x, mode, not alone)
    if alone or dist.get_rank() == 0:
        say(f"{mode}: equal={equal} works={works(planned.sequence)}")
    planned.close()
