"""Merging of stages that share bytes: what runs for it, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotoff
from rotoff.capture.aliasing import merge_aliases
from rotoff.tensors.stage import StageModule


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


def test_change_of_another_stages_table_is_refused() -> None:
    with pytest.raises(rotoff.MeasureError, match="stage '1' changes in place"):
        merged(Pair(), Pair(changes=True))
