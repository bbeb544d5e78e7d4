"""What something beside autograd's saved tensors holds is there for whoever reads it, and is charged."""

from __future__ import annotations

import pytest
import torch
from held_elsewhere import MAKES, MODES, PARTS, draw, fresh, planned
from test_runtime import smallest
from torch import nn


def gradients(run: nn.Module, net: nn.Module) -> list[torch.Tensor]:
    found = []
    for n in range(2):
        torch.manual_seed(n)
        net.zero_grad()
        run(draw()).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MAKES)
def test_gradients_are_those_of_the_plain_model(name: str, mode: str) -> None:
    net = fresh(name)
    expected = gradients(net, net)
    wrapped = planned(net := fresh(name), name, mode)
    least, most = smallest(wrapped, mode), wrapped.keep_all_memory
    for part in PARTS:
        wrapped.compute_sequence(least + int(part * max(0, most - least)), mode=mode, refine=False)
        assert all(torch.equal(a, b) for a, b in zip(gradients(wrapped, net), expected, strict=True)), part
    wrapped.close()
