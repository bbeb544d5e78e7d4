"""What the caller does to parameters and gradients between steps where parameters move."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import own_again, peak_bytes
from torch import nn

import rotoff


class Heads(nn.Module):
    """A trunk with two heads, which steps use in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
        self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(x))


class Decayed(torch.optim.Optimizer):
    """Adds the weight decay to ``p.grad`` itself, as old optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.add_(parameter, alpha=0.01), alpha=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "decay in the gradient": Decayed,
}


def made(name: str, updates: str, share: float) -> list[tuple[Any, nn.Module, torch.optim.Optimizer]]:
    """The plain model, and the same one with a plan; each with its optimizer. share: of the smallest limit."""
    torch.manual_seed(0)
    plain = Heads()
    model = copy.deepcopy(plain)
    placed, optimizer, x = (
        rotoff.Checkpointable(model, cache_directory=None),
        OPTIMIZERS[name](model.parameters()),
        rows(),
    )
    for head in range(2):
        placed.measure(x, head, repeats=1)
    options: dict[str, Any] = {"optimizer": optimizer, "updates": updates, "refine": False}
    with pytest.raises(rotoff.InfeasibleError) as refused:
        placed.compute_sequence(device_limit=1, **options)
    placed.compute_sequence(device_limit=int(share * refused.value.min_mem_limit), **options)
    return [(plain, plain, OPTIMIZERS[name](plain.parameters())), (placed, model, optimizer)]


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(16, 32)


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.grid(every=3)
def test_a_zero_gradient_of_what_a_step_does_not_use_is_one(name: str, updates: str) -> None:
    """Momentum and weight decay go on."""
    x, pairs = rows(), made(name, updates, 2)
    for n in range(6):
        for run, _, optimizer in pairs:
            run(x, n % 2).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert all(map(torch.equal, pairs[0][1].parameters(), pairs[1][1].parameters())), n


@pytest.mark.parametrize("updates", ["after", "during"])
def test_states_of_parameters_that_were_frozen_lie_on_the_host(updates: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    optimizer, x = torch.optim.AdamW(layers.parameters(), lr=1e-2), torch.randn(32, 64)
    for _ in range(2):
        layers(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    layers[:3].requires_grad_(False)
    model = rotoff.Checkpointable(layers, cache_directory=None).measure(x, repeats=1)
    options: dict[str, Any] = {"optimizer": optimizer, "refine": False, "updates": updates}
    with pytest.raises(rotoff.InfeasibleError) as refused:
        model.compute_sequence(device_limit=1, **options)
    model.compute_sequence(device_limit=int(1.2 * refused.value.min_mem_limit), **options)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def start() -> None:
        own_again(layers, [optimizer])
        step()

    states = [layers[0][0].weight, optimizer.state[layers[0][0].weight]["exp_avg"].clone()]
    assert peak_bytes(lambda: (step(), step()), before=start) + x.nbytes <= model.get_expected_memory()
    assert torch.equal(optimizer.state[states[0]]["exp_avg"], states[1])
