"""Merging of stages that share bytes, or that change the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rotoff


class Augmented(nn.Module):
    """Masks the batch in place, at first and again later, as augmentations do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(batch.shape[0]) < 0.3
        batch[mask] = 0
        x: torch.Tensor = batch * 2
        for n, block in enumerate(self.blocks):
            x = x + block(x) * ~mask[:, None]
            if n == 2:
                batch.mul_(0.5)
                x = x + batch
        return x


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
@pytest.mark.parametrize("measured", [True, False])
def test_a_model_that_masks_its_batch_trains(mode: str, measured: bool) -> None:
    """Losses, gradients and batches are those of the plain model."""

    def trained(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            batch = torch.randn(64, 16)
            loss = model(batch).square().mean()
            loss.backward()
            found += [loss.detach(), batch, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    torch.manual_seed(0)
    plain = Augmented()
    model = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None)
    limit = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None).measure(torch.zeros(64, 16))
    if measured:
        model.measure(torch.zeros(64, 16))
    model.compute_sequence(limit.min_mem_limit(mode), mode=mode)
    assert all(map(torch.equal, trained(plain), trained(model)))
