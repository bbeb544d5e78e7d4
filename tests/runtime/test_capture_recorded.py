"""Stages cut from a recorded forward compute what the model computes, bit for bit, and cut where few bytes cross."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from planned_steps import smallest
from step_by_step import works
from torch import nn
from torch.nn import functional as F

import rotoff


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
@pytest.mark.grid(every=8)
def test_training_at_smallest_limit_is_bit_for_bit(name: str, mode: str) -> None:
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


def test_keyword_and_default_arguments_are_filled_in() -> None:
    _, batch = MODELS["two inputs"]
    model = TwoInputs()
    tokens, weight, _ = batch()
    wrapped = rotoff.Checkpointable(model).compute_sequence("1 MiB")
    out = wrapped(weight=weight, tokens=tokens)
    torch.testing.assert_close(out, model(tokens, weight), rtol=0, atol=0)
    with pytest.raises(rotoff.MeasureError, match="cannot be called like this"):
        wrapped(tokens)


def steps(model: nn.Module, *batches: tuple[Any, ...]) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of one step for each batch, from the same random state."""
    torch.manual_seed(5)
    seen = []
    for batch in batches:
        model.zero_grad()
        output = model(*batch)
        output.square().mean().backward()
        seen += [output.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        seen += [b.clone() for b in model.buffers()]
    return seen


def same_as_plain(model: nn.Module, *batches: tuple[Any, ...], **options: Any) -> rotoff.Checkpointable:
    """Check that `model` under its smallest limit gives the plain one's bits; returns it wrapped."""
    twin = copy.deepcopy(model)
    expected = steps(model, *batches)
    wrapped = rotoff.Checkpointable(twin, check=True, **options).measure(*batches[0])
    with pytest.raises(rotoff.InfeasibleError) as caught:
        wrapped.compute_sequence(1)
    wrapped.compute_sequence(caught.value.min_mem_limit)
    got = steps(wrapped, *batches)
    assert len(got) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    return wrapped


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.rate = 0.1

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = F.dropout(torch.tanh(self.linear(self.norm(x))), self.rate, self.training)
        return x + (y if mask is None else y * mask)


class Masked(nn.Module):
    """Makes a mask and a table once, for all layers; asks whether the mask does anything, as transformers does."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        mask = None
        if keep is not None and not keep.all():
            mask = (keep[:, None].float() + torch.arange(8) * 0).contiguous()
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_branch_on_the_batch_has_a_plan_for_each_case() -> None:
    some, every = torch.arange(16) % 2 == 0, torch.ones(16, dtype=torch.bool)
    batches = [(torch.randn(16, 8), keep) for keep in (some, every, some, every)]
    same_as_plain(Masked(), *batches)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2 + 0 * ctx.saved_tensors[0]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Odds(nn.Module):
    """All kinds of calls: custom and scripted functions, in place, slices, iteration, views, tables, no_grad,
    autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.register_buffer("seen", torch.zeros(()))
        self.table = torch.arange(8.0)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, *args: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x, y = args
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            mean = x.mean(0, keepdim=True)
        x = self.norm(x) - mean * scale
        z = torch.zeros_like(x)
        z[:, ::2] = x[:, ::2] * self.table[::2]
        z[..., 1::2] += y.T[: len(x), 1::2]
        a, b = Doubled.apply(z).chunk(2, 1)
        rows = [row.tanh() for row in scripted(torch.cat((b, a), dim=1))]
        x = torch.stack(rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.weighted(x)
        values, _ = self.spectral(x.float()).sort(dim=-1)
        x = torch.einsum("ij,kj->ik", values, values)[:, :8]
        return self.rnn(x[None])[0][0].masked_fill(x > 3, 0.0)


def test_all_kinds_of_calls_are_recorded() -> None:
    batch = (torch.randn(12, 8), torch.randn(8, 12))
    same_as_plain(Odds(), batch, batch)


def test_custom_function_is_one_call_while_measuring() -> None:
    """Its stage has forms, which are tried by runs of the stage that was written out."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(32, 128), nn.Linear(128, 32)]) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for up, down in self.layers:
                x = x + Doubled.apply(down(torch.tanh(up(x)))) * scripted(torch.ones(32))
            return x

    wrapped = same_as_plain(Doubles(), (torch.randn(64, 32),), cache_directory=None)
    wrapped.close()


@pytest.mark.parametrize("by_name", [True, False])
def test_named_modules_are_the_stages(by_name: bool) -> None:
    model = Masked()
    batch = (torch.randn(16, 8), torch.arange(16) % 2 == 0)
    asked = [f"layers.{n}" for n in range(4)] if by_name else None
    twin = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(twin, check=True, stages=asked or list(twin.layers)).measure(*batch)
    assert [stage.name for stage in wrapped.chain.stages] == ["first", "layers.0", "layers.1", "layers.2", "layers.3"]
    with pytest.raises(rotoff.InfeasibleError) as caught:
        wrapped.compute_sequence(1)
    wrapped.compute_sequence(caught.value.min_mem_limit)
    assert all(torch.equal(a, b) for a, b in zip(steps(wrapped, batch), steps(model, batch), strict=True))
    for m in (model, twin):
        m.layers[1].rate = 0.0
    assert all(torch.equal(a, b) for a, b in zip(steps(wrapped, batch), steps(model, batch), strict=True))


def test_stages_option_sets_number_of_stages() -> None:
    batch = (torch.randn(16, 8), None)
    few = rotoff.Checkpointable(Masked(8), stages=4).measure(*batch)
    many = rotoff.Checkpointable(Masked(8), stages=60).measure(*batch)
    assert len(few.chain) <= 8 < len(many.chain)


def test_stages_are_shown_as_a_table() -> None:
    model = Masked()
    found = rotoff.stages(model, torch.randn(16, 8), torch.arange(16) % 2 == 0)
    assert "cut where few bytes cross" in found.strategy
    lines = str(found).splitlines()
    assert lines[1].split()[:4] == ["stage", "module", "output", "saved"]
    assert "or saved" in lines[1]  # the forms, each with its bytes
    for number, (line, stage) in enumerate(zip(lines[2:], found.chain.stages, strict=False), 1):
        assert line.split()[0] == str(number) and rotoff.format_bytes(stage.saved_bytes) in line
    assert found.to_dict()["stages"][1]["saved_bytes"] == found.chain.stages[1].saved_bytes > 0
    two = rotoff.stages(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(3, 2))
    assert "end where calls of 2 modules end" in two.strategy


def test_argument_hiding_tensors_is_handled() -> None:
    class Box:
        def __init__(self, inside: torch.Tensor) -> None:
            self.inside = inside

    class Boxed(Masked):
        def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, box.inside)

    same_as_plain(Boxed(), *((torch.randn(16, 8), Box(torch.arange(16) % (2 + n) == 0)) for n in range(3)))


ROWS = {"times": 1}


class Grows(nn.Module):
    """Returns more rows once somebody says so, where nobody watches: neither in its attributes nor in its class's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x)] * ROWS["times"])


def test_named_stage_may_return_varying_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = Masked(8), torch.randn(64, 8)
    plain.layers[0] = Grows()
    plain.layers[0].forward = lambda x, mask, inner=plain.layers[0].forward: inner(x)
    wrapped = rotoff.Checkpointable(plain, stages=[f"layers.{n}" for n in range(8)], cache_directory=None).measure(x)
    wrapped.compute_sequence(smallest(wrapped, "remat"), mode="remat", refine=False)
    assert works(wrapped.sequence)
    for times in (1, 2, 3):
        monkeypatch.setitem(ROWS, "times", times)
        got, expected = steps(wrapped, (x,)), steps(plain, (x,))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    wrapped.close()


def test_view_of_parameter_never_crosses_a_cut() -> None:
    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                view = weight.reshape(1, 8, -1)
                y = torch.tanh(x)
                x = x + y @ F.batch_norm(view, None, None, training=True).reshape_as(weight)
            return x

    wrapped = same_as_plain(Standardised(), (torch.randn(64, 8),))
    assert len(wrapped.chain) >= 4


def test_use_cache_in_configuration_is_off_in_training_steps(caplog: pytest.LogCaptureFixture) -> None:
    class Kept:
        pass

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.config = nn.Linear(3, 3), SimpleNamespace(use_cache=True)

        def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, Any]:
            return self.linear(x).tanh(), Kept() if self.config.use_cache else None

    model = Remembers()
    wrapped = rotoff.Checkpointable(model).measure(torch.ones(2, 3)).compute_sequence("1 MiB")
    wrapped.measure(torch.ones(4, 3))
    assert len(wrapped.chain) > 0
    assert model.config.use_cache is True
    assert [record.message for record in caplog.records if "use_cache" in record.message] == [
        "rotoff: training steps of Remembers run with use_cache=False, since no training step reads cached keys and"
        " values; steps of plain PyTorch that keep them may round otherwise. For equal bits set use_cache to False in"
        " the model's configuration, in plain runs, too"
    ]
    assert torch.equal(wrapped(torch.ones(2, 3))[0], model(torch.ones(2, 3))[0])
    wrapped.close()
