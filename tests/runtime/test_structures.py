"""Values and gradients that are no plain tensors, and models that are no plain Python, each right or refused in a
sentence."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from step_by_step import works
from torch import nn

import rotoff


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


@dataclasses.dataclass
class Counted:
    logits: torch.Tensor
    count: int = dataclasses.field(default=0, init=False)


class Net(nn.Module):
    def __init__(self, result: type = Prediction) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(5))
        self.result = result

    def forward(self, batch: Batch) -> Prediction | Counted:
        x = batch.x * batch.scale
        for layer in self.layers:
            x = x + layer(x)
            if batch.mask is not None:
                x = x * batch.mask
        return Prediction(x, Batch(x.mean(0))) if self.result is Prediction else Counted(x)


@pytest.mark.parametrize("masked", [True, False])
def test_dataclasses_go_in_and_out(masked: bool) -> None:
    torch.manual_seed(0)
    plain = Net()
    batch = Batch(torch.randn(64, 32), 0.5, torch.rand(64, 1).round() if masked else None)
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), check=True).measure(batch)
    wrapped.compute_sequence(int(0.5 * wrapped.keep_all_memory))
    assert sum(str(op).startswith("F_") for op in wrapped.sequence) > len(wrapped.chain) or "offload" in str(
        list(wrapped.sequence)
    )
    results = []
    for model in (plain, wrapped):
        out = model(batch)
        assert type(out) is Prediction and type(out.inputs) is Batch and out.loss is None
        (out.logits.square().mean() + out.inputs.x.sum()).backward()
        results.append([out.logits, out.inputs.x, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Bag(nn.Module):
    """Embeddings whose gradient is sparse, where sparse is True."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(100, 32, sparse=sparse)
        self.words = nn.Embedding(50, 32, sparse=sparse)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.words(tokens[:, 0] % 50)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    plain = Bag(sparse=True)
    tokens = torch.randint(0, 100, (64, 6))
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), check=True).measure(tokens)
    wrapped.compute_sequence(int(0.5 * wrapped.keep_all_memory))
    for _ in range(2):  # the second adds to the first's
        for model in (plain, wrapped):
            model(tokens).square().mean().backward()
        for p, q in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and p.grad.is_sparse == q.grad.is_sparse
            assert torch.equal(p.grad.to_dense(), q.grad.to_dense())
    estimated = rotoff.estimate(Bag(sparse=True), tokens, device="H200")
    dense = rotoff.estimate(Bag(sparse=False), tokens, device="H200")
    assert [s.saved_bytes for s in estimated.stages] == [s.saved_bytes for s in dense.stages]


class Experts(Net):
    """Leaves its losses in attributes, as mixtures of experts do; `total` is there before, `losses` is not."""

    def __init__(self, anew: bool = True) -> None:
        super().__init__()
        self.total: torch.Tensor | float = 0.0
        self.anew, self.every = anew, [0]

    def forward(self, batch: Batch) -> torch.Tensor:  # type: ignore[override]
        x, self.losses, self.total = batch.x, {}, 0.0
        for n, layer in enumerate(self.layers):
            x = x + layer(x)
            self.losses[f"layer {n}"] = x.square().mean()
            self.total = self.total + x.abs().mean()
        if not self.anew:
            self.every.append(self.total)
        return x


def test_losses_left_in_attributes_are_those_of_each_step() -> None:
    torch.manual_seed(0)
    plain = Experts()
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), check=True).measure(Batch(torch.randn(64, 32)))
    assert wrapped.total == 0.0 and not hasattr(wrapped, "losses")
    wrapped.compute_sequence(int(0.5 * wrapped.keep_all_memory))
    sequence = list(wrapped.sequence)
    assert works(wrapped.sequence)
    for _ in range(3):
        batch = Batch(torch.randn(64, 32))
        seen = []
        for model in (plain, wrapped):
            model.zero_grad()
            output = model(batch)
            (output.mean() + model.total + sum(model.losses.values())).backward()
            seen.append([output, model.total, *model.losses.values(), *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        assert list(wrapped.losses) == list(plain.losses)
    assert list(wrapped.sequence) == sequence  # what the steps set is no change of the model


class Pack(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 2]))


@pytest.mark.parametrize("stages", [None, ["1"]])
def test_a_packed_sequence_between_stages_is_as_in_the_plain_model(stages: list[str] | None) -> None:
    plain = nn.Sequential(Pack(), nn.LSTM(8, 8))
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), stages=stages).measure(torch.randn(5, 2, 8))
    wrapped.compute_sequence(wrapped.min_mem_limit())
    x = torch.randn(5, 2, 8)
    outputs = [model(x)[0].data for model in (wrapped, plain)]
    for output in outputs:
        output.square().mean().backward()
    assert torch.equal(*outputs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True))
