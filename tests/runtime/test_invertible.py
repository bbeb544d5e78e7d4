"""The invertible BatchNorm + LeakyReLU against PyTorch's pair: outputs, gradients, statistics, bytes, and under a
plan."""

from __future__ import annotations

import pytest
import torch
from planned_steps import bits_and_bytes
from torch import nn

from rotoff import OptionError
from rotoff.nn import InvertibleBatchNormLeakyReLU


def pair(channels: int, **options) -> tuple[nn.Module, nn.Module]:
    """(ours, PyTorch's) with the same parameters, some of them negative, none near 0."""
    ours = InvertibleBatchNormLeakyReLU(channels, negative_slope=0.1, **options).double()
    theirs = nn.Sequential(nn.BatchNorm2d(channels, **options).double(), nn.LeakyReLU(0.1))
    if ours.affine:
        with torch.no_grad():
            ours.weight.uniform_(0.3, 1.5)
            ours.weight[::2] *= -1
            ours.bias.normal_()
    theirs[0].load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1}]
)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_statistics(options, training):
    torch.manual_seed(0)
    ours, theirs = pair(6, **options)
    ours.train(training), theirs.train(training)
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
    for mine, its in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 7), (2, 3, 4, 5), (2, 3, 2, 3, 2)])
def test_gradcheck_in_all_dimensions(shape):
    torch.manual_seed(1)
    layer = InvertibleBatchNormLeakyReLU(3, negative_slope=0.2).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,))


def test_a_weight_of_zero_is_taken_as_a_small_one():
    layer = InvertibleBatchNormLeakyReLU(2, least_weight=0.01).double()
    with torch.no_grad():
        layer.weight.zero_()
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,))
    layer(x).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


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


def network(activation) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n in range(4):
        layers += [nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1, bias=False), *activation(8)]
    return nn.Sequential(*layers)


def test_one_buffer_instead_of_two():
    x = torch.randn(4, 3, 16, 16)
    plain = saved_bytes(network(lambda c: [nn.BatchNorm2d(c), nn.LeakyReLU(0.01, inplace=True)]), x)
    ours = saved_bytes(network(lambda c: [InvertibleBatchNormLeakyReLU(c)]), x)
    map_bytes = 4 * 8 * 16 * 16 * 4
    assert plain // map_bytes == 8
    assert ours // map_bytes == 4


def test_under_a_plan_gradients_and_bytes_are_right():
    model = network(lambda c: [InvertibleBatchNormLeakyReLU(c)])
    bits_and_bytes(model, lambda: torch.randn(8, 3, 24, 24), ["remat", "joint"], (0.5,), check=True)


def test_refusals():
    with pytest.raises(OptionError, match="negative_slope is 0"):
        InvertibleBatchNormLeakyReLU(3, negative_slope=0)
    with pytest.raises(OptionError, match="least_weight is -1"):
        InvertibleBatchNormLeakyReLU(3, least_weight=-1)
    with pytest.raises(ValueError, match="more than one value"):
        InvertibleBatchNormLeakyReLU(3)(torch.randn(1, 3, 1, 1))
