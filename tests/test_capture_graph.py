"""Stages cut from a traced graph compute what the model computes, bit for bit, and cut where few bytes cross."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.capture import graph


class Bottleneck(nn.Module):
    """A residual block with in-place activations, as torchvision writes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width // 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2)
        self.conv2 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*[Bottleneck(16) for _ in range(5)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(torch.relu(self.stem(x)))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class DenseNet(nn.Module):
    """Every layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * k, 4, 3, padding=1) for k in range(6))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(F.dropout(F.gelu(layer(torch.cat(features, 1))), 0.1, self.training))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class UNet(nn.Module):
    """Long skip connections, from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 16), (16, 32)))
        self.up = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((48, 16), (24, 8)))
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for n, conv in enumerate(self.down):
            x = torch.tanh(conv(x))
            if n < 2:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = torch.tanh(conv(torch.cat((x, skips.pop()), 1)))
        return self.out(x)


class TwoInputs(nn.Module):
    """Two arguments, one of them used late; a size that crosses cuts as a number; a parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> dict[str, torch.Tensor]:
        rows = tokens.size(0)
        if bias is not None:
            tokens = tokens + bias
        x = torch.tanh(self.first(self.embed(tokens))) * self.scale
        x = torch.sigmoid(self.second(x)) * self.scale
        return {"out": (x * weight).reshape(rows, -1), "mean": x.mean()}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "resnet": (ResNet, lambda: (torch.randn(4, 3, 16, 16),)),
    "densenet": (DenseNet, lambda: (torch.randn(4, 3, 16, 16),)),
    "unet": (UNet, lambda: (torch.randn(4, 3, 16, 16),)),
    "two inputs": (TwoInputs, lambda: (torch.randint(0, 20, (8, 5)), torch.randn(8, 5, 16), None)),
}


@pytest.mark.parametrize("count", [2, 6, 40])
@pytest.mark.parametrize("name", MODELS)
def test_the_stages_one_after_another_are_the_model(name: str, count: int) -> None:
    build, batch = MODELS[name]
    model, values = build(), batch()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = graph.stages(model, values, count)
    model.load_state_dict(state)  # the sample's run moved the statistics
    torch.manual_seed(3)
    result: Any = values
    for stage in found:
        result = stage.run(result)
    model.load_state_dict(state)
    torch.manual_seed(3)
    expected = model(*values)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert {id(p) for s in found for p in s.parameters()} == {id(p) for p in model.parameters()}


def test_blocks_are_cut_where_only_their_output_is_alive() -> None:
    found = graph.stages(ResNet(), (torch.randn(4, 3, 16, 16),), 6)
    values: Any = (torch.randn(4, 3, 16, 16),)
    crossing = []
    for stage in found[:-1]:
        values = stage.run(values)
        crossing.append(len(values))
    assert crossing == [1] * len(crossing)
    assert len(found) >= 4


def test_a_model_that_branches_on_data_says_so() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(rotoff.MeasureError, match="cannot trace Branches"):
        graph.stages(Branches(), (torch.randn(3),))


def train(model: nn.Module, batch: Callable[[], tuple[Any, ...]], steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        output = model(*batch())
        loss = sum(part.square().mean() for part in (output.values() if isinstance(output, dict) else [output]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_training_at_the_smallest_limit_gives_the_bits_of_the_plain_model(name: str, mode: str) -> None:
    build, batch = MODELS[name]
    torch.manual_seed(0)
    expected = train(build(), batch)
    torch.manual_seed(0)
    wrapped = rotoff.Checkpointable(build(), check=True).measure(*batch())
    with pytest.raises(rotoff.InfeasibleError) as caught:
        wrapped.compute_sequence(1, mode=mode)
    wrapped.compute_sequence(caught.value.min_mem_limit, mode=mode)
    got = train(wrapped, batch)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    x = batch()
    parameters = list(wrapped.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    parts = list(wrapped(*x).values()) if name == "two inputs" else [wrapped(*x)]
    gradients = [torch.ones_like(v) for v in parts]

    def step() -> None:
        output = wrapped(*x)
        torch.autograd.backward(list(output.values()) if isinstance(output, dict) else [output], gradients)

    assert peak_bytes(step) <= wrapped.get_expected_memory()
    wrapped.close()


def test_arguments_by_name_and_left_out_are_filled_in() -> None:
    _, batch = MODELS["two inputs"]
    model = TwoInputs()
    tokens, weight, _ = batch()
    wrapped = rotoff.Checkpointable(model).compute_sequence("1 MiB")
    out = wrapped(weight=weight, tokens=tokens)
    torch.testing.assert_close(out, model(tokens, weight), rtol=0, atol=0)
    with pytest.raises(rotoff.MeasureError, match="cannot be called like this"):
        wrapped(tokens)


def test_a_model_that_no_way_fits_is_told_what_to_do() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > 0 else -x

    class Any_(nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return args[0]

    with pytest.raises(rotoff.MeasureError, match=r"no nn.Sequential, and torch.fx cannot trace Branches .* make the model"):
        rotoff.Checkpointable(Branches()).measure(torch.randn(2, 3))
    with pytest.raises(rotoff.MeasureError, match="takes any number of arguments"):
        rotoff.Checkpointable(Any_()).measure(torch.randn(2, 3))
