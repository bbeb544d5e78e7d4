"""Values and gradients that are no plain tensors, and models that are no plain Python, each right or refused in a
sentence."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
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
