"""What something beside autograd's saved tensors holds is there for whoever reads it, and is charged."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from held_elsewhere import IN_A_SEQUENTIAL, MAKES, MODES, bytes_and_plans, draw, fresh
from torch import nn

CASES = [(name, mode) for name, mode in product(MAKES, MODES) if mode == "joint" or not name.endswith(IN_A_SEQUENTIAL)]


def gradients(run: nn.Module, net: nn.Module) -> list[torch.Tensor]:
    found = []
    for n in range(2):
        torch.manual_seed(n)
        net.zero_grad()
        run(draw()).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_gradients_are_the_plain_ones_and_bytes_the_predicted_ones(name: str, mode: str) -> None:
    net = fresh(name)
    expected = gradients(net, net)
    net = fresh(name)
    for told, wrapped in bytes_and_plans(net, name, mode):
        assert told.measured <= told.predicted <= told.limit, told
        assert all(torch.equal(a, b) for a, b in zip(gradients(wrapped, net), expected, strict=True)), told
