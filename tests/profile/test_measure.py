"""Measuring: exact bytes, and nothing of the user's changed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from allocated import live_bytes, peak_bytes
from models import ALL, fresh
from torch import nn

import rotoff
from rotoff.profile.allocations import logged, peak_of, region

KIB = 1024


class ByNorm(nn.Module):
    """A layer divided by a norm of its weight that is no part of the gradient, as in DoRA; the norm's graph ends in
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = torch.eye(64) @ self.weight * self.weight  # saves two products
        return x @ self.weight / columns.square().sum(0).sqrt().detach()


def test_saved_tensors_of_unused_graph_are_not_counted() -> None:
    """1024 x 64 floats are 256 KiB; the eye and the products, 16 KiB each, go with their graph."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(ByNorm(), nn.GELU()) for _ in range(4)])
    x = torch.randn(1024, 64)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model)).measure(x)
    norm = 64 * 4
    assert [s.saved_bytes for s in wrapped.chain.stages] == [256 * KIB + norm, 256 * KIB] * 4
    estimated = rotoff.estimate(model, x, device="cpu")
    assert [s.saved_bytes for s in estimated.stages] == [s.saved_bytes for s in wrapped.chain.stages]

    def step(of: nn.Module) -> list[torch.Tensor]:
        of.zero_grad()
        of(x).sum().backward()
        return [p.grad for p in of.parameters() if p.grad is not None]

    expected = step(model)
    for mode in ("remat", "offload", "joint"):
        wrapped.compute_sequence(wrapped.keep_all_memory * 6 // 10, mode=mode)
        step(wrapped)
        assert peak_bytes(lambda: step(wrapped)) <= wrapped.get_expected_memory()
        assert all(map(torch.equal, step(wrapped), expected))
        assert rotoff.simulate(wrapped.chain, wrapped.sequence).makespan == wrapped.get_expected_makespan()
    wrapped.close()


def test_measuring_under_a_profiler_is_refused() -> None:
    model = rotoff.Checkpointable(nn.Sequential(nn.Linear(4, 4)))
    with torch.autograd.profiler.profile(), pytest.raises(rotoff.MeasureError, match="profiler is active"):
        model.measure(torch.randn(2, 4))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.grid
def test_measuring_changes_no_user_state(name: str) -> None:
    model, batch = fresh(name)
    x = batch()
    rotoff.Checkpointable(copy.deepcopy(model)).measure(x)  # what is made once in a process
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 3.0)
    state = copy.deepcopy(model.state_dict())
    tensors = x if isinstance(x, tuple) else (x,)
    generator, given = torch.get_rng_state(), [t.detach().clone() for t in tensors]
    buffers = [id(b) for b in model.buffers()]
    wrapped = rotoff.Checkpointable(model)
    live = live_bytes()
    wrapped.measure(x)
    assert live_bytes() == live
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(t, old) for t, old in zip(tensors, given, strict=True))
    assert all(t.grad is None for t in tensors)
    assert [id(b) for b in model.buffers()] == buffers
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None or bool((p.grad == 3).all()) for p in model.parameters())
    wrapped.close()


class Caching(nn.Module):
    """Returns its keys unless told not to, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: torch.Tensor, use_cache: bool | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        keys = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.config.use_cache if use_cache is None else use_cache:
                keys.append(x.detach() * 2)
        return x.square().mean(), keys


def test_caches_are_off_also_if_everything_is_kept() -> None:
    model, x = Caching(), torch.randn(2048, 64)
    wrapped = rotoff.Checkpointable(model).measure(x)

    def one() -> list[torch.Tensor]:
        loss, keys = wrapped(x)
        loss.backward()
        found: list[torch.Tensor] = keys
        return found

    everything = wrapped.keep_all_memory
    for limit in (everything, everything // 2):
        wrapped.compute_sequence(limit)
        assert one() == []
        assert peak_bytes(one) <= wrapped.get_expected_memory() <= limit
    wrapped.close()
    assert len(model(x)[1]) == 12
    asked = rotoff.Checkpointable(model).measure(x, use_cache=True)
    asked.compute_sequence(asked.keep_all_memory)
    assert len(asked(x, use_cache=True)[1]) == 12
    assert asked.keep_all_memory > everything
    asked.close()


def test_allocation_log_contains_temporaries_and_marks() -> None:
    def run() -> torch.Tensor:
        x = torch.empty(1000)
        y = torch.empty(500)
        del x
        with region("middle"):
            pass
        z = torch.empty(100)
        del y
        return z

    kept, log = logged(run, torch.device("cpu"))
    assert peak_of(log) == 6000
    assert sum(event.size for event in log) == 400
    at = [event.begins for event in log].index("middle")
    assert peak_of(log[at:]) == 400
    assert log[at + 1].ends == "middle"
    assert [event.size for event in log if event.ptr == kept.untyped_storage().data_ptr()][-1] == 400
