"""Run by `ranks` in each process of a group: prints what a rank of plain FSDP2 holds at most in a step, its parameters,
states and batch included, for `test_mesh`."""

from __future__ import annotations

import torch
from allocated import peak_bytes
from models import Residual
from ranks import say
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH, BLOCKS, ROWS = 128, 5, 256


class Net(nn.Module):
    """An embedding and a head around numbered blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h), x)


def case() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randint(0, 512, (ROWS,))


def main() -> None:
    model, x = case()
    for block in (*model.layers, model):
        fully_shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    held = [x, *(t.to_local() if hasattr(t, "to_local") else t for t in (*model.parameters(), *states))]
    say(str(sum(t.nbytes for t in held) + peak_bytes(step)))
