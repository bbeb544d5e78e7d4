"""Measuring: exact bytes, and nothing of the user's changed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocated import live_bytes, peak_bytes
from models import ALL, Does, fresh, linears
from planned_steps import bits_and_bytes, drawn
from torch import nn

import rotoff

KIB = 1024


def by_norm(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Divides by a norm of the weight that is no part of the gradient, as in DoRA; the norm's graph ends in nothing."""
    columns = torch.eye(64) @ net.weight * net.weight  # saves two products
    return x @ net.weight / columns.square().sum(0).sqrt().detach()


def test_saved_tensors_of_unused_graph_are_not_counted() -> None:
    """1024 x 64 floats are 256 KiB; the eye and the products, 16 KiB each, go with their graph."""
    torch.manual_seed(0)
    weights = (nn.Parameter(torch.randn(64, 64)) for _ in range(4))
    model = nn.Sequential(*(nn.Sequential(Does(by_norm, weight=weight), nn.GELU()) for weight in weights))
    draw = drawn(1024, 64)
    chain = bits_and_bytes(model, draw, ("remat", "offload", "joint"), (0.2,)).planned.chain
    assert [s.saved_bytes for s in chain.stages] == [256 * KIB + 64 * 4, 256 * KIB] * 4
    estimated = rotoff.estimate(model, *draw(), device="cpu")
    assert [s.saved_bytes for s in estimated.stages] == [s.saved_bytes for s in chain.stages]


def test_the_backward_of_what_made_the_input_is_not_counted() -> None:
    below, above, x = nn.Sequential(*linears(4, 64)), nn.Sequential(*linears(2, 64), nn.Tanh()), torch.randn(16, 64)
    least = []
    for given in (x.clone().requires_grad_(), below(x)):
        run = rotoff.Checkpointable(copy.deepcopy(above)).compute_sequence("1 GiB")
        run(given).sum().backward()
        least.append(run.min_mem_limit())
    assert least[0] == least[1]


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


def caching(net: Any, x: torch.Tensor, use_cache: bool | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns its keys unless told not to, as language models do."""
    keys = []
    for layer in net.layers:
        x = torch.tanh(layer(x))
        if net.config.use_cache if use_cache is None else use_cache:
            keys.append(x.detach() * 2)
    return x.square().mean(), keys


def test_caches_are_off_also_if_everything_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Does(caching, config=SimpleNamespace(use_cache=True), layers=linears(12, 64)), torch.randn(2048, 64)
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
    assert [record.message for record in caplog.records if "use_cache" in record.message] == [
        "rotoff: training steps of Does run with use_cache=False, since no training step reads cached keys and values;"
        " steps of plain PyTorch that keep them may round otherwise. For equal bits set use_cache to False in the"
        " model's configuration, in plain runs, too"
    ]
    loss, keys = model(x)
    assert len(keys) == 12 and torch.equal(wrapped(x)[0], loss)
    asked = rotoff.Checkpointable(model).measure(x, use_cache=True)
    asked.compute_sequence(asked.keep_all_memory)
    assert len(asked(x, use_cache=True)[1]) == 12
    assert asked.keep_all_memory > everything
    asked.close()
