"""Merging of stages that share bytes, or that change the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rotoff
from rotoff.capture.aliasing import merge_aliases
from rotoff.tensors.stage import Copy, StageModule


class Pair(nn.Module):
    """Takes and returns a value and a table of the first such module, which it changes if so told."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.changes, self.runs = changes, 0

    def forward(self, value: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        x, table = value if isinstance(value, tuple) else (value, self.table)
        return x + 1, table.add_(1) if self.changes else table


def merged(*modules: Pair) -> list[StageModule]:
    stages = [StageModule(str(n), (module,)) for n, module in enumerate(modules)]
    return merge_aliases(stages, torch.zeros(4), torch.device("cpu"))


def test_stages_with_several_outputs_run_once() -> None:
    modules = Pair(), Pair(), Pair()
    assert len(merged(*modules)) == 3
    assert [module.runs for module in modules] == [1, 1, 1]


def test_a_change_of_the_batch_or_of_another_stages_table_merges_all_stages_up_to_it() -> None:
    stages = merged(Pair(), Pair(), Pair(changes=True), Pair())
    assert [stage.name for stage in stages] == ["0..2", "3"]
    assert len(stages[0].modules) == 3  # no copy of the batch, which is not changed

    class Late(nn.Module):
        def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return value[0] + value[1].mul_(2)

    class Beside(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, x

    batch = torch.ones(4)
    every = [StageModule(str(n), (module,)) for n, module in enumerate((Beside(), Late(), nn.ReLU()))]
    stages = merge_aliases(every, batch, torch.device("cpu"))
    assert [stage.name for stage in stages] == ["0..1", "2"]
    assert type(stages[0].modules[0]) is Copy
    assert torch.equal(batch, torch.ones(4))


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
