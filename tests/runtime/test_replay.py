"""What is made again in other surroundings than those of the forward: other autocast, flags, hooks and threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from models import fresh, same
from planned_steps import run_twice, smallest, with_sequence
from torch import nn
from torch.autograd.graph import save_on_cpu
from trunks import LENGTH, WIDTH, Trunk

import rotoff


@pytest.mark.parametrize("forward_casts", [True, False])
def test_a_backward_under_other_autocast_than_the_forward(forward_casts: bool) -> None:
    def step(model: nn.Module, batch: object) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_casts):
            loss = model(batch()).float().square().mean()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not forward_casts, cache_enabled=False):
            loss.backward()
            assert torch.is_autocast_enabled("cpu") is not forward_casts
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
        return [p.grad.clone() for p in model.parameters()]

    expected = step(*fresh("residual"))
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_casts):
        wrapped.measure(batch())
    assert same(step(with_sequence(wrapped, run_twice(len(wrapped.chain))), batch), expected)


def batch() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH)


def measured(model: nn.Module) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, cache_directory=None, check=True).measure(batch())


def test_a_step_within_saved_tensor_hooks_of_the_caller() -> None:
    x = batch()
    run = measured(Trunk())
    run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
    with save_on_cpu():
        run(x).sum().backward()
    run.close()


# -- threads


@pytest.fixture
def _untouched() -> Iterator[None]:
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    yield
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply


@pytest.mark.usefixtures("_untouched")
def test_models_may_be_measured_on_several_threads() -> None:
    failed: list[BaseException] = []
    done: list[rotoff.Checkpointable] = []

    def work() -> None:
        try:
            done.append(measured(Trunk()))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for run in done:
        run.compute_sequence(smallest(run, "remat"), mode="remat", refine=False)
        run(batch()).sum().backward()
        run.close()
