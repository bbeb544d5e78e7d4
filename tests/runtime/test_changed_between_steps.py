"""What its user does with a model between steps: borrowed parameters, gradients within, other strides. What else may
change is in the table of test_changing_models.py."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Residual, same
from planned_steps import smallest
from step_by_step import works
from torch import nn

import rotoff


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(16) for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> torch.Tensor:
    return torch.randn(32, 16)


@pytest.mark.parametrize("mode", ["remat", "offload"])
def test_borrowed_parameters(mode: str) -> None:
    torch.manual_seed(0)
    model = Net()
    wrapped = rotoff.Checkpointable(model).measure(batch())
    theirs = {name: p.detach().mul(2).requires_grad_() for name, p in wrapped.named_parameters()}
    x = batch()
    wrapped.compute_sequence(smallest(wrapped, mode), mode=mode)
    assert works(wrapped.sequence)
    torch.manual_seed(3)
    torch.func.functional_call(wrapped, theirs, (x,)).sum().backward()
    got = [p.grad for p in theirs.values()]
    plain = {name: p.detach().clone().requires_grad_() for name, p in theirs.items()}
    torch.manual_seed(3)
    torch.func.functional_call(model, plain, (x,)).sum().backward()
    assert same(got, [p.grad for p in plain.values()])
    assert all(p.grad is None for p in model.parameters())


class Hidden(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:  # type: ignore[override]
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.head(x), hidden


@pytest.mark.parametrize("mode", ["remat", "offload"])
@pytest.mark.parametrize("how", ["retain_grad", "register_hook", "grad", "inputs"])
@pytest.mark.grid
def test_a_gradient_of_an_intermediate_result(how: str, mode: str) -> None:
    plain = Hidden()
    model = rotoff.Checkpointable(copy.deepcopy(plain)).measure(batch())
    model.compute_sequence(smallest(model, mode), mode=mode)
    assert works(model.sequence)
    x, seen = batch(), []
    for one in (model, plain):
        torch.manual_seed(3)
        gradients: list[torch.Tensor] = []
        y, hidden = one(x)
        loss = y.mean() + hidden[1].sin().mean()
        if how == "register_hook":
            hidden[1].register_hook(gradients.append)
        else:
            hidden[1].retain_grad()
        if how == "grad":
            seen.append(list(torch.autograd.grad(loss, [hidden[1], *one.parameters()], materialize_grads=True)))
            continue
        loss.backward(inputs=[hidden[1]] if how == "inputs" else None)
        gradients += [p.grad for p in [hidden[1], *one.parameters()] if p.is_leaf or how != "register_hook"]
        seen.append([gradient for gradient in gradients if gradient is not None])
    assert same(*seen)
