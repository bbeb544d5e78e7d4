"""What is made again in other surroundings than those of the forward (other autocast, flags, hooks and threads) is what
the first run made, by the same kernels."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import Does, fresh, same
from planned_steps import Beside, bits_and_bytes, drawn, run_twice
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from trunks import LENGTH, WIDTH, Trunk

import rotoff
from rotoff.planning import step_courses
from rotoff.profile.recorded_step import BUSY


@pytest.mark.parametrize("casts", [True, False])
def test_a_backward_under_other_autocast_than_the_forward(casts: bool) -> None:
    def under_the_other(output: torch.Tensor, _: Any) -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=not casts, cache_enabled=False):
            output.float().square().mean().backward()
            assert torch.is_autocast_enabled("cpu") is not casts
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()

    def around() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts)

    model, batch = fresh("residual")
    beside = Beside(model, sample=(batch(),), around=around, backward=under_the_other)
    beside.following(run_twice(len(beside.planned.chain)))
    beside.step(batch())


def batch() -> torch.Tensor:
    return torch.randn(LENGTH, WIDTH)


def measured(model: nn.Module) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, check=True).measure(batch())


def test_a_step_within_saved_tensor_hooks_of_the_caller() -> None:
    x = batch()
    beside = Beside(Trunk(), sample=(x,), check=True).within("remat")
    with save_on_cpu():
        beside.step(x)


# -- threads


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
        run.compute_sequence(run.min_mem_limit("remat"), mode="remat", refine=False)
        run(batch()).sum().backward()
        run.close()


def test_a_first_step_while_another_thread_has_just_begun_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_courses, "BUSY", threading.Lock())  # the step looks here, before the other one begins
    beside = Beside(Trunk(), 1 << 40)
    with BUSY:
        beside.step(batch())
    assert beside.planned.plans() == []
    beside.step(batch())
    assert len(beside.planned.plans()) == 1


def test_a_step_in_another_thread_while_one_is_recorded() -> None:
    net = Trunk()
    twin, x = copy.deepcopy(net), batch()
    planned = rotoff.Checkpointable(twin).compute_sequence(1 << 40)

    def gradients(run: nn.Module, blocks: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def another(*_: Any) -> None:
            handle.remove()
            thread = threading.Thread(target=lambda: found.append(run(0.5 * x)))
            thread.start()
            thread.join()

        handle = blocks[2].register_forward_hook(another)
        found.append(run(x))
        sum(output.square().mean() for output in found).backward()
        return [p.grad for p in run.parameters() if p.grad is not None]

    assert same(gradients(net, net.blocks), gradients(planned, twin.blocks))
    assert {len(calls) for calls in planned.profile.trace.calls.values()} == {1}


def native() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


def convolved(net: Any, x: torch.Tensor) -> torch.Tensor:
    for n, layer in enumerate(net.layers):
        with native() if net.within and n % 2 else nullcontext():
            x = x + layer(x).tanh()
    return x.square().mean()


def convolutions(within: bool) -> nn.Module:
    return Does(convolved, within=within, layers=nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)))


def attend(net: Any, x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        for layer in net.layers:
            q, k, v = layer(x).view(2, 24, 3, 2, 8).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 24, 16)
    return x.square().mean()


def attention() -> nn.Module:
    return Does(attend, layers=nn.ModuleList(nn.Linear(16, 48) for _ in range(4)))


MODELS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "around": (lambda: convolutions(within=False), (2, 8, 12, 12), native),
    "within": (lambda: convolutions(within=True), (2, 8, 12, 12), nullcontext),
    "attention": (attention, (2, 24, 16), nullcontext),  # whose fused kernel saves no matrix of scores
}


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.grid
def test_gradients_and_bytes(name: str, mode: str) -> None:
    make, shape, around = MODELS[name]
    bits_and_bytes(make(), drawn(*shape), [mode], around=around)


def test_a_step_under_other_flags_has_a_plan_of_its_own() -> None:
    x = torch.randn(2, 8, 12, 12)
    beside = Beside(convolutions(within=False), sample=(x,), around=native).within("remat")
    beside.planned.measure(x)
    beside.at(beside.limit, "remat").step(x)
    beside.check(x)
