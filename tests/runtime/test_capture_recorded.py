"""How a model is called, with what, and the stages that are cut from its recorded forward."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from models import Does, several
from planned_steps import Beside
from step_by_step import works
from torch import nn
from torch.nn import functional as F

import rotoff


class Filled(nn.Module):
    """Two arguments, a third one with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.layer(self.embed(tokens if bias is None else tokens + bias)))
        return {"out": (x * weight).reshape(tokens.size(0), -1), "mean": x.mean()}


def test_keyword_and_default_arguments_are_filled_in() -> None:
    model, tokens, weight = Filled(), torch.randint(0, 20, (8, 5)), torch.randn(8, 5, 16)
    wrapped = rotoff.Checkpointable(model).compute_sequence("1 MiB")
    out = wrapped(weight=weight, tokens=tokens)
    torch.testing.assert_close(out, model(tokens, weight), rtol=0, atol=0)
    with pytest.raises(rotoff.MeasureError, match="cannot be called like this"):
        wrapped(tokens)


def masked(layers: int = 4) -> nn.Module:
    """Makes a mask once, for all layers; asks whether the mask does anything, as transformers does."""

    def layer(net: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = F.dropout(torch.tanh(net.linear(net.norm(x))), net.rate, net.training)
        return x + (y if mask is None else y * mask)

    def forward(net: Any, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        x = net.first(x)
        mask = None if keep is None or keep.all() else (keep[:, None].float() + torch.arange(8) * 0).contiguous()
        for one in net.layers:
            x = one(x, mask)
        return x

    parts = (Does(layer, linear=nn.Linear(8, 8), norm=nn.LayerNorm(8), rate=0.1) for _ in range(layers))
    return Does(forward, first=nn.Linear(8, 8), layers=nn.ModuleList(parts))


def test_named_modules_are_the_stages() -> None:
    plain: Any = masked()
    batch = (torch.randn(16, 8), torch.arange(16) % 2 == 0)
    asked = ["layers.0", "layers.1", "layers.2", plain.layers[3]]
    beside = Beside(plain, sample=batch, fresh=lambda: plain, check=True, stages=asked)
    assert [one.name for one in beside.planned.chain.stages] == [
        "first",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
    ]
    beside.within("joint").step(*batch)
    plain.layers[1].rate = 0.0
    beside.step(*batch)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
    logits: torch.Tensor
    inputs: Batch
    loss: torch.Tensor | None = None


def predict(net: Any, batch: Batch) -> Prediction:
    x = batch.x * batch.scale
    for layer in net.layers:
        x = x + layer(x)
        if batch.mask is not None:
            x = x * batch.mask
    return Prediction(x, Batch(x.mean(0)))


def from_prediction(out: Prediction, _: Any = None) -> None:
    assert type(out) is Prediction and type(out.inputs) is Batch and out.loss is None
    (out.logits.square().mean() + out.inputs.x.sum()).backward()


@pytest.mark.parametrize("masked", [True, False])
def test_dataclasses_go_in_and_out(masked: bool) -> None:
    torch.manual_seed(0)
    batch = Batch(torch.randn(64, 32), 0.5, torch.rand(64, 1).round() if masked else None)
    plain = Does(predict, layers=several(5, 32, 128))
    beside = Beside(plain, sample=(batch,), backward=from_prediction, check=True).within("joint", 0.2)
    assert works(beside.planned.sequence)
    beside.step(batch)


def embed(net: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = net.table(tokens) + net.words(tokens[:, 0] % 50)
    for layer in net.layers:
        x = x + layer(x)
    return x


def bag(sparse: bool) -> nn.Module:
    """Embeddings whose gradient is sparse, where sparse is True."""
    table, words = nn.EmbeddingBag(100, 32, sparse=sparse), nn.Embedding(50, 32, sparse=sparse)
    return Does(embed, table=table, words=words, layers=several(4, 32, 128))


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    plain = bag(sparse=True)
    tokens = torch.randint(0, 100, (64, 6))
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), check=True).measure(tokens)
    wrapped.compute_sequence(int(0.5 * wrapped.keep_all_memory))
    for _ in range(2):  # the second adds to the first's
        for model in (plain, wrapped):
            model(tokens).square().mean().backward()
        for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and p.grad.is_sparse == q.grad.is_sparse
            assert torch.equal(p.grad.to_dense(), q.grad.to_dense())
    estimated = rotoff.estimate(bag(sparse=True), tokens, device="H200")
    dense = rotoff.estimate(bag(sparse=False), tokens, device="H200")
    assert [s.saved_bytes for s in estimated.stages] == [s.saved_bytes for s in dense.stages]
