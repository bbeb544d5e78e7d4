"""What is made again in other surroundings than those of the forward: other autocast, flags, hooks and threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from models import fresh, same
from planned_steps import smallest, with_sequence
from torch import nn
from torch.autograd.graph import save_on_cpu
from trunks import LENGTH, WIDTH, Trunk

import rotoff
from rotoff.core.sequence import FORWARDS


def run_twice(L: int) -> rotoff.Sequence:
    """Every stage but the last runs again right before its backward."""
    text = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        text += [f"F_all {i}", f"B {i}"]
    return rotoff.Sequence.from_text(text)


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


@pytest.mark.parametrize("switch", ["frozen, then thawed", "frozen between", "eval between"])
def test_what_is_switched_between_a_forward_and_its_backward(switch: str) -> None:
    """A GAN freezes its discriminator for the generator's loss and thaws it before the backward."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    begun_frozen = switch == "frozen, then thawed"

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(64, 32).requires_grad_()
        model.requires_grad_(not begun_frozen)
        loss = model(x).square().mean()
        if switch == "eval between":
            model.eval()
        else:
            model.requires_grad_(begun_frozen)
        loss.backward()
        flags = [p.requires_grad for p in model.parameters()] + [m.training for m in layers]
        assert set(flags) == ({False, True} if switch == "frozen between" else {True, switch != "eval between"})
        model.train()
        model.requires_grad_(not begun_frozen)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [x.grad.clone(), *grads, *(b.clone() for b in model.buffers())]

    state = copy.deepcopy(model.state_dict())
    expected = step(model) + step(model)
    model.load_state_dict(state)
    model.requires_grad_(not begun_frozen)
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(64, 32).requires_grad_())
    wrapped.compute_sequence(smallest(wrapped, "remat"), mode="remat")
    assert any(op.kind in FORWARDS for op in wrapped.sequence.ops[len(wrapped.chain) + 1 :])
    assert same(step(wrapped) + step(wrapped), expected)


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
