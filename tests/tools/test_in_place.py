"""A model planned where it stands stays the object that it is, and trains as the plain one does."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from models import Does, fresh, same, several
from step_by_step import works
from torch import nn

import rotoff
from rotoff.errors import MeasureError, OptionError
from rotoff.tools.attach import attached


def gradients(model: nn.Module, x: torch.Tensor, seed: int = 3) -> list[torch.Tensor]:
    """Of one training step of the model."""
    torch.manual_seed(seed)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_nothing_of_it_is_seen() -> None:
    model, _ = fresh("mlp")

    def seen() -> tuple[object, ...]:
        names = list(model.state_dict()), [n for n, _ in model.named_modules()]
        return type(model), *names, inspect.signature(model.forward)

    before = seen()
    planned = rotoff.attach(model, "1 GiB")
    assert seen() == before
    assert attached(model) is planned
    assert "forward" in vars(model)
    rotoff.detach(model)
    assert attached(model) is None
    assert "forward" not in vars(model)
    rotoff.detach(model)  # harmless


def test_the_first_training_forward_is_measured_and_eval_is_the_models() -> None:
    model, batch = fresh("mlp")
    x = batch()
    planned = rotoff.attach(model, "1 GiB")
    with torch.no_grad():
        model(x)
    model.eval()(x)
    with pytest.raises(MeasureError, match="nothing has been measured"):
        _ = planned.chain
    model.train()(x).sum().backward()
    assert len(planned.chain) >= 2
    profile = planned.measure(x).profile
    for _ in range(2):
        model(x).sum().backward()
        assert planned.profile is profile  # which is not measured again


def test_hooks_of_the_model_run_once_for_each_call() -> None:
    model, batch = fresh("residual")
    x, calls = batch(), []
    planned = rotoff.attach(model, 2**40)
    planned.measure(x)
    model.register_forward_hook(lambda *_: calls.append("forward"))
    for limit in (2**40, planned.min_mem_limit()):  # the plain model, and a planned step
        planned.compute_sequence(limit, refine=False)
        calls.clear()
        model(x).sum().backward()
        assert calls == ["forward"]


def test_a_forward_that_others_wrap_keeps_the_plan_inside() -> None:
    model, batch = fresh("residual")
    x = batch()
    planned = rotoff.attach(model, 2**40)
    inner, seen = model.forward, []

    def outer(*args: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*args).float()

    model.forward = outer
    model(x).sum().backward()
    assert seen == [False]
    plain, _ = fresh("residual")
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        plain(x).float().square().sum().backward()
    planned.compute_sequence(planned.min_mem_limit(), refine=False)
    assert same(gradients(model, x), [p.grad for p in plain.parameters()])


def recurrent(net: Any, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
    """Calls itself."""
    for block in net.blocks:
        x = block(x)
    return net(x, depth - 1) if depth else x


def test_a_forward_that_calls_itself() -> None:
    torch.manual_seed(0)
    plain = Does(recurrent, blocks=several(3, 16, 64))
    model = copy.deepcopy(plain)
    x = torch.randn(64, 16)
    planned = rotoff.attach(model, "1 GiB").measure(x)
    planned.compute_sequence(planned.min_mem_limit(), refine=False)
    assert works(planned.sequence)
    assert same(gradients(model, x), gradients(plain, x))
    assert len(planned.plans()) == 1


def test_what_is_attached_is_not_planned_by_another() -> None:
    model, x = fresh("mlp")[0], torch.randn(4, 16)
    planned = rotoff.attach(model, "1 GiB")
    for ask in (
        lambda: rotoff.Checkpointable(model),
        lambda: rotoff.stages(model, x),
        lambda: rotoff.plan(model, x, mem_limit="1 GiB"),
        lambda: rotoff.estimate(planned, x),
    ):
        with pytest.raises(MeasureError, match=r"planned already, by rotoff\.attach; rotoff\.detach\(model\) frees it"):
            ask()
    with pytest.raises(OptionError, match="attached already"):
        rotoff.attach(model, "1 GiB")
    rotoff.detach(model)
    rotoff.Checkpointable(model)
    with pytest.raises(MeasureError, match=r"give a torch\.nn\.Module"):
        rotoff.attach([model], "1 GiB")  # type: ignore[arg-type]
