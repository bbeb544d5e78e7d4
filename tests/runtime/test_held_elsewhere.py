"""What something beside autograd's saved tensors holds is there for whoever reads it, and is charged."""

from __future__ import annotations

import pytest
import torch
from held_elsewhere import (
    IN_A_SEQUENTIAL,
    LENGTH,
    MAKES,
    WIDTH,
    Trunk,
    bytes_and_plans,
    draw,
    fresh,
    planned,
)
from planned_steps import smallest
from torch import nn

import rotoff

WITHOUT_FORMS, WITH = ("remat", "offload"), ("joint",)
CASES = [
    (name, modes)
    for name in MAKES
    for modes in (WITHOUT_FORMS, WITH)
    if modes == WITH or not name.endswith(IN_A_SEQUENTIAL)
]


def gradients(run: nn.Module, net: nn.Module) -> list[torch.Tensor]:
    found = []
    for n in range(2):
        torch.manual_seed(n)
        net.zero_grad()
        run(draw()).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize(("name", "modes"), CASES)
@pytest.mark.grid(every=8)
def test_gradients_are_the_plain_ones_and_bytes_the_predicted_ones(name: str, modes: tuple[str, ...]) -> None:
    net = fresh(name)
    expected = gradients(net, net)
    net = fresh(name)
    for told, wrapped in bytes_and_plans(net, name, *modes):
        assert told.measured <= told.predicted <= told.limit, told
        assert all(torch.equal(a, b) for a, b in zip(gradients(wrapped, net), expected, strict=True)), told


class Counts(nn.Module):
    """Saves a buffer that every forward changes, and that none may be seen to have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.trunk = nn.BatchNorm1d(WIDTH), Trunk()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.trunk(self.norm(x) * (1 + self.count / 10))


class Normalized(nn.Module):
    """Each forward overwrites the buffers of its spectral norm, which it has not read before, and reads them again."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        for module in list(self.trunk.modules()):
            if isinstance(module, nn.Linear):
                nn.utils.spectral_norm(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x)


@pytest.mark.parametrize("make", [Counts, Normalized])
@pytest.mark.parametrize("length", [LENGTH, LENGTH // 2])
def test_a_graph_that_waits_is_none_the_worse_for_another_forward(make: type[nn.Module], length: int) -> None:
    """Of the same size, or of another one, which is recorded."""
    seen = []
    for planned_one in (False, True):
        torch.manual_seed(0)
        net = make()
        run: nn.Module = planned(net, "", "remat") if planned_one else net
        if isinstance(run, rotoff.Checkpointable):
            run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
        torch.manual_seed(1)
        net.zero_grad()
        first, second = run(draw()).square().mean(), run(draw()[:length]).square().mean()
        second.backward()
        first.backward()
        seen.append(
            [*(p.grad.clone() for p in net.parameters() if p.grad is not None), *(b.clone() for b in net.buffers())]
        )
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
