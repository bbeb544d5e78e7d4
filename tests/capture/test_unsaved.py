"""Stages become one where nobody keeps what lies between them, and only there."""

from __future__ import annotations

import pytest
import torch
from planned_steps import smallest
from torch import nn

import rotoff
from rotoff.capture.sharding import gathers
from rotoff.capture.unsaved import Group, merge_groups, merge_unsaved
from rotoff.profile import stage_bytes
from rotoff.tensors.stage import StageModule


def names(*modules: nn.Module, x: torch.Tensor) -> list[str]:
    stages = [StageModule(str(n), (module,)) for n, module in enumerate(modules)]
    return [stage.name for stage in merge_unsaved(stages, x, torch.device("cpu"))]


def test_saved_values_keep_stages_apart() -> None:
    x = torch.randn(64, 32)
    linear = [nn.Linear(32, 32) for _ in range(4)]
    assert names(*linear, x=x) == ["0", "1", "2", "3"]  # each saves its input
    assert names(linear[0], nn.ReLU(), nn.Dropout(), linear[1], x=x) == ["0..1", "2", "3"]  # ReLU saves what it makes
    assert names(linear[0], nn.GELU(), nn.BatchNorm1d(32), linear[1], x=x) == ["0", "1", "2", "3"]


def test_stages_that_save_nothing_are_merged() -> None:
    frozen = [nn.Linear(32, 32).requires_grad_(False) for _ in range(4)]
    assert names(*frozen, nn.Tanh(), nn.Linear(32, 8), x=torch.randn(64, 32, requires_grad=True)) == ["0..4", "5"]


def test_stages_before_first_gradient_are_not_merged() -> None:
    frozen = nn.Linear(32, 32).requires_grad_(False)
    assert names(frozen, nn.Linear(32, 32), nn.ReLU(), x=torch.randn(64, 32)) == ["0", "1..2"]


def test_bottleneck_value_is_kept_for_replays() -> None:
    narrow, wide = nn.Linear(32, 4).requires_grad_(False), nn.Linear(4, 32).requires_grad_(False)
    assert names(narrow, wide, nn.Linear(32, 8), x=torch.randn(64, 32, requires_grad=True)) == ["0", "1", "2"]


def test_output_held_elsewhere_prevents_merging() -> None:
    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    assert names(Keeping(32, 32), nn.ReLU(), nn.Linear(32, 8), x=torch.randn(64, 32)) == ["0", "1", "2"]


def test_a_value_of_the_sample_that_stages_pass_on_calls_for_no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0].relu()  # saves nothing of the labels, and does not return them

    class First(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return pair[0].tanh(), pair[1]

    monkeypatch.setattr("rotoff.capture.unsaved.gc.collect", lambda: pytest.fail("a collection looks at all objects"))
    stages = [StageModule(str(n), (module,)) for n, module in enumerate((First(), Last()))]
    pair = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    assert [stage.name for stage in merge_unsaved(stages, pair, torch.device("cpu"))] == ["0", "1"]


def test_merged_stage_needs_no_more_than_its_parts() -> None:
    def group(name: str, given: int, made: int, kept: int, unsaved: int) -> Group:
        return Group(StageModule(name, ()), given, made, kept, unsaved)

    linear, relu, rest = group("a", 4, 4, 4, 4), group("b", 4, 4, 4, 0), group("c", 4, 4, 4, 0)
    assert linear.need_bytes == relu.need_bytes == linear.merged(relu).need_bytes == 4 + 4 + 4 + 4
    assert [g.stage.name for g in merge_groups([linear, relu, rest])] == ["a..b", "c"]
    masks = [group(str(n), 4, 4, 8, 4) for n in range(3)]  # each saves as much again, beside its output
    assert masks[0].merged(masks[1]).need_bytes == 4 + 12 + 4 + 4 > masks[0].need_bytes
    assert merge_groups(masks) == masks
    # the wide input would be held for longer
    shrinks = group("wide", 16, 4, 4, 4)
    assert [g.stage.name for g in merge_groups([shrinks, group("m", 4, 4, 6, 4)])] == ["wide", "m"]


def test_named_stages_are_not_merged() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    x = torch.randn(64, 32)
    assert [s.name for s in rotoff.Checkpointable(model).measure(x).chain.stages] == ["0..1", "2"]
    named = rotoff.Checkpointable(model, stages=["0", "1", "2"]).measure(x)
    assert [s.name for s in named.chain.stages] == ["0", "1", "2"]


def test_merging_keeps_smallest_limit_and_lowers_keep_all_memory() -> None:
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))]
    model, x = nn.Sequential(*layers), torch.randn(2048, 64)
    merged = rotoff.Checkpointable(model).measure(x)
    apart = rotoff.Checkpointable(model, stages=[str(n) for n in range(12)]).measure(x)
    assert (len(merged.chain), len(apart.chain)) == (8, 12)
    whole, parts = (rotoff.simulate(m.chain, rotoff.keep_all(m.chain)).peak_bytes for m in (merged, apart))
    assert whole <= parts - 4 * 2048 * 64 * 4
    assert merged.keep_all_memory == apart.keep_all_memory  # both are the plain model
    for mode in ("joint", "remat", "offload"):
        assert smallest(merged, mode) <= smallest(apart, mode)


# -- which modules gather parameters from other processes while they run


def test_parameters_of_one_process_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a stage that saves them is not run again and again for a collective's sake."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not gathers(model)
    runs = []
    kept = stage_bytes.keep_everything
    monkeypatch.setattr(
        stage_bytes, "keep_everything", lambda run, *rest: runs.append(run.stage.name) or kept(run, *rest)
    )
    rotoff.Checkpointable(model).measure(torch.randn(2, 4))
    assert runs == ["0", "1"]
