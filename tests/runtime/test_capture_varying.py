"""Steps whose data need more than was measured, and constants: limits and bits as in the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from allocated import peak_bytes
from torch import nn

import rotoff


class Picks(nn.Module):
    """Puts the rows above a threshold through a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        pieces = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)]
        self.before, self.after = nn.Sequential(*pieces[:2]), nn.Sequential(*pieces[2:])
        self.wide = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, least: float) -> torch.Tensor:
        h = self.before(x)
        picked = x[:, 0] > least
        return self.after(h.masked_scatter(picked[:, None], self.wide(h[picked])))


class PicksOften(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Picks() for _ in range(4))

    def forward(self, x: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x, least)
        return x.sum()


def test_values_that_data_made_a_little_larger_than_measured_still_leave_the_device() -> None:
    torch.manual_seed(0)
    model, x = PicksOften(), torch.randn(256, 8)
    run = rotoff.Checkpointable(model, cache_directory=None).measure(x, torch.tensor(0.0))
    limit = run.min_mem_limit("offload")
    run.compute_sequence(limit, mode="offload", refine=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run(x, torch.tensor(-0.1)).backward()
    assert peak_bytes(lambda: run(x, torch.tensor(-0.1)).backward()) <= 1.15 * limit
    run.close()


def test_values_that_data_made_larger_stay_on_the_device_if_the_host_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = PicksOften(), torch.randn(256, 8)
    twin = copy.deepcopy(model)
    run = rotoff.Checkpointable(model, cache_directory=None).measure(x, torch.tensor(0.0))
    run.compute_sequence(run.min_mem_limit("offload"), mode="offload", refine=False)
    run(x, torch.tensor(0.0)).backward()
    model.zero_grad()

    def full(_self: object, nbytes: int) -> None:
        raise rotoff.ExecutionError(f"{nbytes} bytes are needed")

    monkeypatch.setattr("rotoff.runtime.links.host_file.HostFile.reserve", full)
    for one in (run, twin):
        one(x, torch.tensor(-0.1)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    run.close()
