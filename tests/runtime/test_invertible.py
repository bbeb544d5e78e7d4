"""The invertible BatchNorm + LeakyReLU of JSEA 2019 against PyTorch's pair: outputs, gradients, bytes, and under a
plan."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from planned_steps import bits_and_bytes, drawn
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "papers"))
from invertible_norm import InvertibleBatchNormLeakyReLU


def test_outputs_gradients_and_statistics() -> None:
    torch.manual_seed(0)
    ours = InvertibleBatchNormLeakyReLU(6).double()
    with torch.no_grad():
        ours.weight.uniform_(0.3, 1.5)
        ours.weight[::2] *= -1
        ours.bias.normal_()
    theirs = nn.Sequential(nn.BatchNorm2d(6).double(), nn.LeakyReLU(0.01))
    theirs[0].load_state_dict(ours.state_dict())
    for _ in range(3):
        x = torch.randn(4, 6, 5, 3, dtype=torch.float64) * 3 + 1
        xs = [x.clone().requires_grad_() for _ in range(2)]
        ys = [module(x) for module, x in zip((ours, theirs), xs, strict=True)]
        torch.testing.assert_close(*ys)
        for y in ys:
            (y.sin() * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad)
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
    torch.testing.assert_close(ours.running_var, theirs[0].running_var)


def network(activation) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n in range(4):
        layers += [nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1, bias=False), *activation(8)]
    return nn.Sequential(*layers)


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = model(x)
    parameters = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}
    assert made is not None
    return sum(size for key, size in storages.items() if key not in parameters)


def test_one_buffer_instead_of_two() -> None:
    x = torch.randn(4, 3, 16, 16)
    plain = saved_bytes(network(lambda c: [nn.BatchNorm2d(c), nn.LeakyReLU(0.01, inplace=True)]), x)
    ours = saved_bytes(network(lambda c: [InvertibleBatchNormLeakyReLU(c)]), x)
    map_bytes = 4 * 8 * 16 * 16 * 4
    assert plain // map_bytes == 8
    assert ours // map_bytes == 4


def test_under_a_plan_gradients_and_bytes_are_right() -> None:
    model = network(lambda c: [InvertibleBatchNormLeakyReLU(c)])
    bits_and_bytes(model, drawn(8, 3, 24, 24), ["remat", "joint"], (0.5,), check=True)
