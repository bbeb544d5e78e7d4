"""Modules whose work depends on data, taken whole by themselves and run by their own code; constants and conjugates; to
the plain model's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from step_by_step import works
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rotoff


class Experts(nn.Module):
    """A loop over the experts in use, each on the rows sent to it."""

    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        counts = torch.nn.functional.one_hot(chosen, len(self.experts)).sum(0)
        for expert in counts.greater(0).nonzero():
            rows = (chosen == expert).nonzero()[:, 0]
            result[rows] = self.experts[expert](x[rows]).tanh()
        return result


class Sent(nn.Module):
    """Chooses an expert for each row."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.before, self.router, self.experts = nn.Linear(width, width), nn.Linear(width, 4), Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        return x + self.experts(x, self.router(x).argmax(1))


class Shifted(nn.Module):
    """Rolls by a number that it computes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.roll(y, int(y.detach().sum(0).argmax()), 1).sin()


class Counter(nn.Module):
    """Replaces its buffer by another in each step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = torch.maximum(self.most, x.detach().abs().amax(0))
        return x / (1 + self.most)


def trained(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for x in batches:
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())]
        found += [b.clone() for b in model.buffers()]
    return found


@pytest.mark.parametrize("block", [Sent, Shifted, Counter])
@pytest.mark.parametrize("share", [0.0, 2.0])
@pytest.mark.grid
def test_data_dependent_modules_run_their_own_code(block: type[nn.Module], share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), block(), nn.Linear(8, 8)) for _ in range(4)))
    batches = [torch.randn(12, 8), 3 * torch.randn(12, 8), torch.ones(12, 8)]  # the last sends all rows to one expert
    twin = copy.deepcopy(model)
    expected = trained(model, batches)
    # as the forward of another model, so that it is recorded
    wrapped = rotoff.Checkpointable(Around(twin), cache_directory=None).measure(batches[0])
    try:
        wrapped.compute_sequence(int(share * wrapped.keep_all_memory) or 1, mode="remat", refine=False)
    except rotoff.InfeasibleError as error:
        wrapped.compute_sequence(error.min_mem_limit, mode="remat", refine=False)
    got = trained(wrapped, batches)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    wrapped.close()


class Paced(nn.Module):
    """Goes by a count of the steps that it has made, read before it counts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = 1 / (1 + (self.steps + 1).item())
        self.steps += 1
        return x * share


@pytest.mark.parametrize("block", [Paced, lambda: nn.BatchNorm1d(8, momentum=None)], ids=["Paced", "BatchNorm1d"])
def test_step_counter_does_not_cause_measuring(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    pieces = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    model = Around(nn.Sequential(*pieces[:2], block(), *pieces[2:]))
    batches = [part * torch.randn(400, 8) for part in (1, 3, 0)]
    twin = copy.deepcopy(model)
    expected = trained(model, batches)
    wrapped = rotoff.Checkpointable(twin, cache_directory=None).measure(batches[0])
    with pytest.raises(rotoff.InfeasibleError) as least:
        wrapped.compute_sequence(1, mode="remat", refine=False)
    wrapped.compute_sequence(least.value.min_mem_limit, mode="remat", refine=False)
    got = trained(wrapped, batches)
    assert len(wrapped.plans()) == 1
    assert wrapped.sequence.meta["source"] != "keep-all"
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    wrapped.close()


class Packs(nn.Module):
    """A recurrent layer on sequences of various lengths, a tensor or a list of them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.rows = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rows(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Reads(nn.Module):
    """Packs in a submodule, or in its own forward."""

    def __init__(self, width: int = 8, inside: bool = True) -> None:
        super().__init__()
        self.inside = inside
        piece = nn.Sequential(nn.Linear(width, 16 * width), nn.GELU(), nn.Linear(16 * width, width))
        self.before = nn.Sequential(*(copy.deepcopy(piece) for _ in range(3)))
        self.packs, self.after = Packs(width), copy.deepcopy(self.before)

    def forward(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        x = self.before(x)
        return self.after(self.packs(x, lengths) if self.inside else Packs.forward(self.packs, x, lengths))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_packed_sequences_may_vary_in_length(kind: Callable[[list[int]], Any], inside: bool) -> None:
    torch.manual_seed(0)
    model, x = Reads(inside=inside), torch.randn(6, 7, 8)
    twin = copy.deepcopy(model)
    run = rotoff.Checkpointable(model, cache_directory=None).measure(x, kind([7] * 6))
    run.compute_sequence(int(0.9 * run.keep_all_memory), mode="remat", refine=False)
    assert works(run.sequence)
    for lengths in ([7] * 6, [1, 5, 2, 7, 3, 3], [2, 4, 1, 1, 3, 2]):
        expected, got = twin(x, kind(lengths)), run(x, kind(lengths))
        gradients = [
            torch.autograd.grad(y.square().sum(), list(m.parameters())) for y, m in ((expected, twin), (got, model))
        ]
        assert torch.equal(got, expected)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    run.close()


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


def test_data_that_needs_more_than_the_limit_is_told_with_the_figure(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Picks(), torch.randn(64, 8)
    twin = copy.deepcopy(model)
    run = rotoff.Checkpointable(model, cache_directory=None).measure(x, 1.0)
    limit = (run.min_mem_limit("joint") + run.keep_all_memory) // 2
    run.compute_sequence(limit)
    for least, told in ((1.0, 0), (2.0, 0), (-9.0, 1), (-9.0, 1)):
        for one in (twin, run):
            one(x, least).square().sum().backward()
        assert sum("a step made tensors larger" in line for line in caplog.messages) == told
    assert f"the limit is {rotoff.format_bytes(limit)}" in caplog.text
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    run.close()


class PicksOften(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Picks() for _ in range(4))

    def forward(self, x: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x, least)
        return x.sum()


@pytest.mark.parametrize("mode", ["offload", "joint"])
def test_values_that_data_made_a_little_larger_than_measured_still_leave_the_device(mode: str) -> None:
    torch.manual_seed(0)
    model, x = PicksOften(), torch.randn(256, 8)
    run = rotoff.Checkpointable(model, cache_directory=None).measure(x, torch.tensor(0.0))
    limit = run.min_mem_limit(mode)
    run.compute_sequence(limit, mode=mode, refine=False)
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


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 1.0


class Table(nn.Module):
    """A tensor that is no buffer, cast to what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.arange(4.0), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table.to(torch.float32)


def test_constant_returned_by_a_call_stays_a_constant() -> None:
    model, x = Table(), torch.ones(2, 4)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x).compute_sequence("1 MiB")
    assert torch.equal(wrapped(x), model(x))
