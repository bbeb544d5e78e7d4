"""Custom autograd Functions that run modules of the model, as reversible layers and adjoint solvers do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allocated import peak_bytes
from torch import nn

import rotoff


class Reversible(torch.autograd.Function):
    """x + f(x), whose backward solves for x and adds to the ``.grad`` of f's parameters by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.f = f
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            y = torch.cat([a + f(b), b], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        da, db = gradient.chunk(2, -1)
        b = ctx.saved_tensors[0].chunk(2, -1)[1].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.f(b), da)
        return torch.cat([da, db + b.grad], -1), None


class Adjoint(torch.autograd.Function):
    """Three Euler steps of dx/dt = f(x), made again in the backward; the parameters are arguments."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor], *parameters: nn.Parameter
    ) -> torch.Tensor:
        ctx.f = f
        ctx.save_for_backward(x, *parameters)
        for _ in range(3):
            x = x + f(x) / 3
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        start, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = first = start.detach().requires_grad_()
            for _ in range(3):
                x = x + ctx.f(x) / 3
            given, *of = torch.autograd.grad(x, [first, *parameters], gradient)
        return given, None, *of


class Layer(nn.Module):
    """how: whether the Function gets the module, or a function that calls it, or its parameters, too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        width = 32 if "adjoint" in how else 16
        norm = nn.BatchNorm1d(64) if "norm" in how else nn.Identity()
        self.f = nn.Sequential(nn.Linear(width, 64), norm, nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, width))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.f if "module" in self.how else lambda x: self.f(x)
        if "adjoint" in self.how:
            return Adjoint.apply(x, f, *self.f.parameters())
        return Reversible.apply(x, f)


HOWS = ("module", "function", "function, norm", "adjoint, module, norm", "adjoint, function, norm")


def made(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    wide = [nn.Sequential(Layer(how), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 32), *wide)


def trained(model: Any, optimizer: torch.optim.Optimizer, micro_batches: int) -> list[torch.Tensor]:
    """Losses and what four steps leave. The first ones find gradients that were there before."""
    torch.manual_seed(1)
    losses = []
    for n in range(4 * micro_batches):
        loss = model(torch.randn(64, 8)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if (n + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(tensor.clone() for tensor in model.state_dict().values())]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
def test_gradients_and_statistics_are_the_plain_models(how: str, mode: str) -> None:
    plain, model = made(how), rotoff.Checkpointable(made(how), cache_directory=None)
    expected = trained(plain, optimizer_of(plain), 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    limit = model.measure(torch.zeros(64, 8)).min_mem_limit(mode)
    assert all(parameter.grad.eq(3.0).all() for parameter in model.parameters())
    model.compute_sequence(limit, mode=mode).zero_grad()
    found = trained(model, optimizer_of(model), 2)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("how", HOWS)
def test_a_first_step_may_measure_them(how: str) -> None:
    plain, model = made(how), rotoff.Checkpointable(made(how), cache_directory=None)
    expected = trained(plain, optimizer_of(plain), 2)
    probe = rotoff.Checkpointable(made(how), cache_directory=None).measure(torch.zeros(64, 8))
    model.compute_sequence(probe.min_mem_limit("remat"), mode="remat")
    assert all(map(torch.equal, expected, trained(model, optimizer_of(model), 2)))


@pytest.mark.parametrize("how", HOWS)
def test_a_step_stays_within_its_prediction(how: str) -> None:
    model, x = rotoff.Checkpointable(made(how), cache_directory=None), torch.randn(64, 8)
    model.compute_sequence(model.measure(x).min_mem_limit())
    model(x).backward(torch.ones(64, 32))  # gradients are the caller's
    unit = torch.ones(64, 32)
    assert peak_bytes(lambda: model(x).backward(unit)) <= model.get_expected_memory()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("updates", ["after", "during"])
def test_their_parameters_are_there_where_others_are_moved(how: str, updates: str) -> None:
    plain, model = made(how), rotoff.Checkpointable(made(how), cache_directory=None)
    expected = trained(plain, optimizer_of(plain), 1)
    optimizer = optimizer_of(model)
    model.measure(torch.zeros(64, 8))
    options: dict[str, Any] = {"optimizer": optimizer, "updates": updates, "refine": False}
    with pytest.raises(rotoff.InfeasibleError) as refused:
        model.compute_sequence(device_limit=1, **options)
    model.compute_sequence(device_limit=refused.value.min_mem_limit, **options)
    assert all(map(torch.equal, expected, trained(model, optimizer, 1)))


class Drawing(Layer):
    """Its own code, which replays run, draws from generators of all kinds and counts."""

    def __init__(self, what: str) -> None:
        super().__init__("module")
        self.what = what
        self.number, self.seen, self.table = 0, [], {"calls": 0}
        self.own, self.of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.of_python, self.array = random.Random(0), np.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * DRAWN[self.what](self))


def counted(layer: Any) -> float:
    layer.number += 1
    layer.seen.append(layer.number)
    layer.table["calls"] += 1
    layer.array += 1
    return 1 + 0.1 * layer.number + 0.1 * len(layer.seen) + 0.1 * layer.table["calls"] + float(layer.array[0])


DRAWN: dict[str, Callable[[Any], Any]] = {
    "Python's generator": lambda layer: 0.5 + random.random(),
    "NumPy's generator": lambda layer: 0.5 + np.random.rand(),
    "a generator of Python's of its own": lambda layer: 0.5 + layer.of_python.random(),
    "a generator of NumPy's of its own": lambda layer: 0.5 + layer.of_numpy.random(),
    "a torch.Generator of its own": lambda layer: 0.5 + torch.rand((), generator=layer.own),
    "counters": counted,
}


@pytest.mark.parametrize("what", DRAWN)
@pytest.mark.parametrize("first", [False, True], ids=["measured before", "measured in the first step"])
def test_a_replay_of_such_a_module_finds_the_state_of_its_first_run(what: str, first: bool) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        wide = [nn.Sequential(Drawing(what), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 32), *wide)

    def run(model: Any) -> list[torch.Tensor]:
        random.seed(0)
        np.random.seed(0)
        return [*trained(model, optimizer_of(model), 1), torch.tensor([random.random(), np.random.rand()])]

    plain, model = made(), rotoff.Checkpointable(made(), cache_directory=None)
    measured = rotoff.Checkpointable(made(), cache_directory=None) if first else model
    model.compute_sequence(measured.measure(torch.zeros(64, 8)).min_mem_limit("remat"), mode="remat")
    assert all(map(torch.equal, run(plain), run(model)))
    own, others = (
        [(layer.number, layer.seen, layer.table, layer.of_python.random(), layer.of_numpy.random()) for layer in found]
        for found in ([one for one in m.modules() if isinstance(one, Drawing)] for m in (plain, model))
    )
    assert own == others


class AtTheTop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reversible.apply(x * 2, lambda x: self.f(x))


def test_in_the_models_own_forward_they_are_refused_with_a_cure() -> None:
    said = "uses modules or parameters inside of Reversible, an autograd.Function.*in a submodule"
    with pytest.raises(rotoff.MeasureError, match=said):
        rotoff.Checkpointable(AtTheTop(), cache_directory=None).measure(torch.randn(4, 32))


class Seeding(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.seed()
        return super().forward(x)


class SeedingInside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reversible.apply(x, lambda x: torch.manual_seed(torch.seed()) and self.f(x))


@pytest.mark.parametrize("kind", [Seeding, SeedingInside])
def test_a_seed_that_no_replay_gets_again_is_refused(kind: type[Layer]) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(kind("module"), nn.Linear(32, 32)), nn.Linear(32, 8))
    with pytest.raises(rotoff.MeasureError, match=r"calls torch.seed\(\), whose number no replay gets again.*randint"):
        rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(4, 8))
