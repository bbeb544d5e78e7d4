"""Run by `ranks`: a few steps of models whose own code communicates, with and without rotoff; prints lines that
`test_distributed` reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import say
from torch import nn
from torch.distributed.nn.functional import all_gather

import rotoff
from rotoff.core.sequence import OpKind

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


class Attention(nn.Module):
    """Of a part of the sequence on all of it (context parallel)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        k, v = GATHERS[self.kind](torch.cat((k, v), -1)).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Centred(nn.Module):
    """Less the mean over all processes, which no gradient flows through."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean((0, 1))
        if self.kind == "reduced later":
            dist.all_reduce(mean, async_op=True).wait()
        elif self.kind == "gathered":
            parts = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mean)
            mean = torch.stack(parts).sum(0)
        elif self.kind == "exchanged":
            other = 1 - dist.get_rank()
            sent, arriving = dist.isend(mean, other), torch.empty_like(mean)
            dist.recv(arriving, other)
            sent.wait()
            mean = mean + arriving
        else:
            dist.all_reduce(mean)
        return x + self.down(torch.tanh(self.up(x - mean)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = Attention if kind in GATHERS else Centred
        self.blocks = nn.ModuleList(block(kind) for _ in range(5))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(run: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(run.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for n in range(3):
        optimizer.zero_grad()
        loss = run(x + n).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in run.parameters())]
        optimizer.step()
    return seen


def main(kind: str) -> None:
    kind = kind.replace("_", " ")
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    if kind in ("alone", "exchanged"):
        try:
            group = None if kind == "alone" else True
            rotoff.Checkpointable(Net(kind), process_group=group, cache_directory=None).measure(x)
        except rotoff.MeasureError as error:
            if dist.get_rank() == 0:
                say(str(error))
        return
    expected = train(Net(kind), x)
    for mode in ("remat", "offload"):
        planned = rotoff.Checkpointable(Net(kind), process_group=True, cache_directory=None).measure(x)
        planned.compute_sequence((planned.min_mem_limit(mode) + planned.keep_all_memory) // 2, mode=mode)
        got = train(planned, x)
        equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        works = any(op.kind not in (OpKind.F_ALL, OpKind.B) for op in planned.sequence)
        if dist.get_rank() == 0:
            say(f"{mode}: equal={equal} works={works}")
        planned.close()
