"""Selective checkpointing by `rotoff.selective_policy`: its bytes, its bits, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import Does, same
from planned_steps import step_peak
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotoff

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from grid import models as grid_models

Draw = Callable[[], torch.Tensor]


def drawing(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws three times; the first numbers are the result of a function, which a checkpoint could keep."""
    x = x * torch.rand_like(x).log().sin()
    return torch.rand_like(x) * net.dropout(torch.tanh(net.linear(x)))


def counting(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads a buffer that it changes."""
    net.calls.add_(1)
    return torch.tanh(net.linear(x)) * net.calls.clone()


def between(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What runs between two blocks saves more than they do."""
    for layer in net.layers:
        x = layer(x).sin().exp().cos()
    return x


def noisy(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws numbers that PyTorch does not know of."""
    y = torch.tanh(x)
    np.add(y.detach().numpy(), np.random.default_rng().random(1), out=y.detach().numpy())
    return y.sin()


def four(does: Callable[..., torch.Tensor], part: Callable[[], dict[str, Any]]) -> nn.Sequential:
    return nn.Sequential(*(Does(does, linear=nn.Linear(64, 64), **part()) for _ in range(4)))


def rows() -> torch.Tensor:
    return torch.randn(2048, 64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "gpt": (lambda: grid_models.gpt(4, 64, 2, 64, 50, 0.1), lambda: torch.randint(50, (8, 64))),
    "resnet": (lambda: grid_models.resnet((2, 2, 2), 10, 8), lambda: torch.randn(16, 3, 64, 64)),
    "drawing": (lambda: four(drawing, lambda: {"dropout": nn.Dropout(0.3)}), rows),
    "counting": (lambda: four(counting, lambda: {"calls": nn.Buffer(torch.ones(()))}), rows),
    "between": (
        lambda: Does(
            between,
            layers=nn.ModuleList(
                nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(3)
            ),
        ),
        rows,
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def checkpointed(model: nn.Module, policy: rotoff.SelectivePolicy) -> nn.Module:
    for name, context_fn in policy.items():
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context_fn)
    return model


def trained(model: nn.Module, draw: Draw, run: Callable[..., Any] | None = None, many: int = 1) -> list[torch.Tensor]:
    """Gradients and buffers after so many forwards, then their backwards."""
    torch.manual_seed(1)
    outputs = [(run or model)(draw()) for _ in range(many)]
    for output in outputs:
        output.square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("device", [None, "CPU"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.grid(every=3)
def test_bytes_are_as_told_and_bits_are_the_plain_models(name: str, device: str | None) -> None:
    draw = MODELS[name][1]
    expected = trained(made(name), draw, many=2)
    measured_once = rotoff.Checkpointable(made(name)).measure(draw())

    def chosen(limit: int) -> rotoff.SelectivePolicy:
        if device is None:
            return rotoff.selective_policy(measured_once, mem_limit=limit)
        return rotoff.selective_policy(made(name), draw(), mem_limit=limit, device=device)

    everything = chosen(1 << 40)
    assert not everything and everything.peak_bytes == everything.keep_all_bytes
    # an estimate lacks what kernels of convolutions take for themselves, which counts at the smallest limit
    for share in (0.9, 0.7, 0.55, 0.0) if device is None else (0.9, 0.7):
        limit = int(share * everything.peak_bytes) + 1
        try:
            policy = chosen(limit)
        except rotoff.InfeasibleError as error:
            assert error.min_mem_limit > limit
            policy = chosen(error.min_mem_limit)
        else:
            assert policy.peak_bytes <= limit
        assert policy and policy.overhead > 0
        assert same(trained(checkpointed(made(name), policy), draw, many=2), expected), policy
        measured = step_peak(checkpointed(made(name), policy), draw)
        assert 0.95 * policy.peak_bytes <= measured <= policy.peak_bytes * (1 if device is None else 1.05), policy


def test_a_smaller_limit_takes_longer_and_too_small_a_one_names_the_smallest() -> None:
    model, x = made("gpt"), MODELS["gpt"][1]()
    overheads = [
        rotoff.selective_policy(model, x, mem_limit=share, device="H200").overhead
        for share in range(12 << 20, 3 << 20, -(1 << 20))
    ]
    assert overheads == sorted(overheads) and overheads[0] < overheads[-1]
    with pytest.raises(rotoff.InfeasibleError, match="the limit is 1.00 KiB") as error:
        rotoff.selective_policy(model, x, mem_limit="1 KiB", device="H200")
    least = error.value.min_mem_limit
    assert rotoff.selective_policy(model, x, mem_limit=least, device="H200").peak_bytes == least
    with pytest.raises(rotoff.InfeasibleError):
        rotoff.selective_policy(model, x, mem_limit=least - 1, device="H200")


@pytest.mark.parametrize(("name", "limit"), [("gpt", "4 MiB"), ("resnet", "5 MiB")])
def test_compiled_blocks_have_the_gradients_of_the_compiled_model(name: str, limit: str) -> None:
    draw = MODELS[name][1]
    torch._dynamo.reset()
    plain = made(name)
    expected = trained(plain, draw, torch.compile(plain, backend="aot_eager"))
    wrapped = rotoff.Checkpointable(made(name)).measure(draw()).compute_sequence(limit, mode="remat")
    policy = rotoff.selective_policy(wrapped)  # its measurement, and its limit
    assert policy.peak_bytes <= rotoff.parse_bytes(limit) and any(policy.kept.values())
    torch._dynamo.reset()
    model = checkpointed(made(name), policy)
    assert same(trained(model, draw, torch.compile(model, backend="aot_eager")), expected)


def test_processes_follow_the_first_ones_choice() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = rotoff.Checkpointable(made("gpt"), process_group=True).measure(MODELS["gpt"][1]())
        policy = rotoff.selective_policy(wrapped, mem_limit="6 MiB")
        assert policy and policy.peak_bytes <= 6 * 2**20
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_checkpoint_would_get_wrong_is_refused() -> None:
    twice = Does(lambda net, x: net.layer(net.layer(x)), layer=nn.Linear(8, 8))

    def refused(blocks: list[str], match: str) -> None:
        with pytest.raises(rotoff.OptionError, match=match):
            rotoff.selective_policy(twice, torch.randn(4, 8), mem_limit=1, blocks=blocks, device="CPU")

    refused(["layer"], "'layer', which is called 2 times in a step")
    refused(["layers"], "'layers', which no step calls; did you mean layer?")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    with pytest.raises(rotoff.OptionError, match="'1', which has an input that is overwritten"):
        rotoff.selective_policy(model, torch.randn(4, 8), mem_limit=1, blocks=["1"], device="CPU")
    with pytest.raises(rotoff.LimitError):
        rotoff.selective_policy(model, torch.randn(4, 8), device="CPU")
    model = nn.Sequential(nn.Linear(8, 8), Does(noisy), nn.Linear(8, 8))
    with pytest.raises(rotoff.OptionError, match="'1', which has an operation whose result differs"):
        rotoff.selective_policy(model, torch.randn(4, 8), mem_limit=1 << 20, blocks=["1"])
