"""How a model is called, and the stages that are cut from its recorded forward."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rotoff


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


def test_keyword_and_default_arguments_are_filled_in() -> None:
    model, tokens, weight = TwoInputs(), torch.randint(0, 20, (8, 5)), torch.randn(8, 5, 16)
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


def test_named_modules_are_the_stages() -> None:
    model = Masked()
    batch = (torch.randn(16, 8), torch.arange(16) % 2 == 0)
    twin = copy.deepcopy(model)
    asked = ["layers.0", "layers.1", *twin.layers[2:]]
    wrapped = rotoff.Checkpointable(twin, check=True, stages=asked).measure(*batch)
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
