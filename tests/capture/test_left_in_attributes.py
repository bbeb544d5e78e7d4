"""A module whose work depends on data may leave tensors in attributes that the model's own code reads."""

from __future__ import annotations

import pytest
import torch
from planned_steps import smallest
from torch import nn

import rotoff


class Experts(nn.Module):
    """Some experts get no rows; the balance of all is in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.gate(x).softmax(-1)
        best, out = chances.argmax(-1), torch.zeros_like(x)
        self.balance = chances.mean(0).square().sum()
        self.spread = [chances.var()]
        for n, expert in enumerate(self.experts):
            rows = (best == n).nonzero(as_tuple=True)[0]
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * chances[rows, n, None])
        return x + torch.tanh(out)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), Experts()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(block[2].balance + block[2].spread[0] for block in self.blocks)


def trained(limited: bool, mode: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, batches = Net(), [torch.randn(64, 16) for _ in range(3)]
    model = rotoff.Checkpointable(net, cache_directory=None) if limited else net
    if isinstance(model, rotoff.Checkpointable):
        model.measure(batches[0])
        model.compute_sequence(smallest(model, mode), mode=mode)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for x in batches:
        losses.append(model(x))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *net.parameters()]


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
def test_a_loss_in_an_attribute_of_a_module_that_goes_by_data(mode: str) -> None:
    assert all(map(torch.equal, trained(True, mode), trained(False, mode)))
