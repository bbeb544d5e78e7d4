"""Custom autograd Functions that run modules of the model, as reversible layers and adjoint solvers do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class Box:
    number: int = 0


@dataclass(slots=True)
class Slotted:
    number: int = 0


class Drawing(Layer):
    """Its own code, which replays run, draws from generators of all kinds and counts."""

    def __init__(self, what: str) -> None:
        super().__init__("module")
        self.what = what
        self.number, self.seen, self.table = 0, [], {"calls": 0}
        self.own, self.of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.of_python, self.array = random.Random(0), np.zeros(1)
        self.box, self.slotted, self.nested = Box(), Slotted(), {"a": [{"b": 0}]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * DRAWN[self.what](self))


def counted(layer: Any) -> float:
    layer.number += 1
    layer.seen.append(layer.number)
    layer.table["calls"] += 1
    layer.array += 1
    return 1 + 0.1 * layer.number + 0.1 * len(layer.seen) + 0.1 * layer.table["calls"] + float(layer.array[0])


def counted_within(layer: Any) -> float:
    layer.box.number += 1
    layer.slotted.number += 1
    layer.nested["a"][0]["b"] += 1
    layer.new = getattr(layer, "new", 0) + 1
    return 1 + 0.1 * (layer.box.number + layer.slotted.number + layer.nested["a"][0]["b"] + layer.new)


DRAWN: dict[str, Callable[[Any], Any]] = {
    "Python's generator": lambda layer: 0.5 + random.random(),
    "NumPy's generator": lambda layer: 0.5 + np.random.rand(),
    "a generator of Python's of its own": lambda layer: 0.5 + layer.of_python.random(),
    "a generator of NumPy's of its own": lambda layer: 0.5 + layer.of_numpy.random(),
    "a torch.Generator of its own": lambda layer: 0.5 + torch.rand((), generator=layer.own),
    "counters": counted,
    "counters in objects and containers, and an attribute that the first call makes": counted_within,
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
        [
            (layer.number, layer.seen, layer.table, layer.of_python.random(), layer.of_numpy.random())
            + (layer.box, layer.slotted, layer.nested, getattr(layer, "new", 0))
            for layer in found
        ]
        for found in ([one for one in m.modules() if isinstance(one, Drawing)] for m in (plain, model))
    )
    assert own == others


READ: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "a module": lambda f, x: f(x),
    "a parameter": lambda f, x: nn.functional.linear(x, f.weight),
    "its transpose": lambda f, x: x @ f.weight.T,
    "its data": lambda f, x: x * f.weight.detach().sum(),
}


class AtTheTop(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.f, self.what = nn.Linear(16, 16), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reversible.apply(x * 2, lambda x: READ[self.what](self.f, x))


@pytest.mark.parametrize("what", READ)
def test_in_the_models_own_forward_they_are_refused_with_a_cure(what: str) -> None:
    said = "uses modules or parameters inside of Reversible, an autograd.Function.*in a submodule"
    with pytest.raises(rotoff.MeasureError, match=said):
        rotoff.Checkpointable(AtTheTop(what), cache_directory=None).measure(torch.randn(4, 32))


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


class Switched(Layer):
    """Runs its module through a custom Function while it is on."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on:
            return super().forward(x)
        a, b = x.chunk(2, -1)
        return x if "adjoint" in self.how else torch.cat([a + b.tanh(), b], -1)


class Within(torch.autograd.Function):
    """Calls its module while the layer is on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x + layer.f(x.chunk(2, -1)[0]).repeat(1, 2) if layer.on else x + x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class SwitchedWithin(Switched):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Within.apply(x, self)


class Counting(nn.Module):
    """Draws from Python's and NumPy's generators, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x * (random.random() + np.random.rand() + 0.1 * len(self.seen))


CHANGES = [*((Switched, how) for how in HOWS), *((SwitchedWithin, how) for how in HOWS[1:3])]


def switched(kind: type[Switched], how: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [kind(how) for _ in range(3)]
    for layer in layers:
        layer.f.append(Counting())
    wide = [nn.Sequential(layer, nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for layer in layers]
    return nn.Sequential(nn.Linear(8, 32), *wide)


def switched_run(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    random.seed(0)
    np.random.seed(0)
    layers = [layer for layer in model.modules() if isinstance(layer, Switched)]
    found = []
    for n in range(5):
        for layer in layers:
            layer.on = n in (1, 3, 4)
        found += trained(model, optimizer, 1)
    return [*found, *(torch.tensor([random.random(), np.random.rand(), *layer.f[-1].seen]) for layer in layers)]


@pytest.mark.parametrize(("kind", "how"), CHANGES)
@pytest.mark.parametrize("mode", ["remat", "joint"])
def test_a_course_without_them_may_come_to_have_them(kind: type[Switched], how: str, mode: str) -> None:
    plain = switched(kind, how)
    model, other = (rotoff.Checkpointable(switched(kind, how), cache_directory=None) for _ in range(2))
    for layer in other.modules():
        layer.on = True
    limits = [one.measure(torch.zeros(64, 8)).min_mem_limit(mode) for one in (model, other)]
    model.compute_sequence(max(limits), mode=mode)
    expected = switched_run(plain, optimizer_of(plain))
    assert all(map(torch.equal, expected, switched_run(model, optimizer_of(model))))


class Scaled(Layer):
    """Its scale, and what it has seen, are set by the module around it."""

    def __init__(self) -> None:
        super().__init__("module")
        self.scale, self.seen = 1.0, {"steps": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale * len(self.seen["steps"]))


class Setting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(Scaled()), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner[0].scale *= 0.9
        self.inner[0].seen["steps"].append(1)
        x = self.last(self.inner(x))
        self.inner[0].scale *= 0.9
        return x


@pytest.mark.parametrize("what", ["measured before", "measured in the first step", "other sizes"])
def test_code_around_such_a_module_may_set_what_it_reads(what: str) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        wide = [nn.Sequential(Setting(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 32), *wide)

    def run(model: Any) -> list[Any]:
        found: list[Any] = []
        torch.manual_seed(1)
        for n in range(4):
            loss = model(torch.randn(64 - 8 * n * (what == "other sizes"), 8)).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad for p in model.parameters())]
            model.zero_grad()
        scaled = [one for one in model.modules() if isinstance(one, Scaled)]
        return [*found, torch.tensor([[one.scale, len(one.seen["steps"])] for one in scaled])]

    model, other = (rotoff.Checkpointable(made(), cache_directory=None) for _ in range(2))
    measured = other if what == "measured in the first step" else model
    model.compute_sequence(measured.measure(torch.zeros(64, 8)).min_mem_limit("remat"), mode="remat")
    assert all(map(torch.equal, run(made()), run(model)))


class Handed(nn.Module):
    """Gives a module that runs as a whole a tensor of the same forward, in an attribute or as a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.last, self.how = Scaled(), nn.Linear(32, 32), how
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "a parameter":
            made = {"f.0.weight": self.inner.f[0].weight * 2}
            return self.last(torch.func.functional_call(self.inner, made, (x,)))
        graph = self.scale if "graph" in self.how else 1
        self.inner.scale = torch.rand(32) * graph  # type: ignore[assignment]
        x = self.inner(x)
        self.inner.scale = torch.rand(32) * graph  # type: ignore[assignment]
        return self.last(self.inner(x))


def handing(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    wide = [nn.Sequential(Handed(how), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 32), *wide)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mode", ["remat", "offload"])
@pytest.mark.parametrize("how", ["an attribute", "an attribute, graph", "a parameter"])
def test_a_tensor_of_the_same_forward_may_be_in_an_attribute_that_it_reads(how: str, mode: str, first: bool) -> None:
    plain, model = handing(how), rotoff.Checkpointable(handing(how), cache_directory=None)
    measured = rotoff.Checkpointable(handing(how), cache_directory=None) if first else model
    limit = measured.measure(torch.zeros(64, 8)).min_mem_limit(mode) + 3 * 128 * first  # what attributes hold meanwhile
    model.compute_sequence(limit, mode=mode)
    assert all(map(torch.equal, trained(plain, optimizer_of(plain), 1), trained(model, optimizer_of(model), 1)))


class Later(Layer):
    """Changes what it holds while it is on, in code that replays run."""

    def __init__(self, what: str) -> None:
        super().__init__("module")
        self.what, self.on = what, False
        self.number, self.seen = 0, []
        self.register_buffer("table", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on and self.what == "attributes":
            self.number += 1
            self.seen.append(self.number)
        elif self.on:
            self.table.mul_(1.5)
        return super().forward(x * (self.table + self.number + len(self.seen)))


@pytest.mark.parametrize("what", ["attributes", "a buffer"])
def test_a_module_that_runs_as_a_whole_may_come_to_change(what: str) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        wide = [nn.Sequential(Later(what), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 32), *wide)

    plain, model, x = made(), rotoff.Checkpointable(made(), cache_directory=None), torch.randn(64, 8)
    model.compute_sequence(model.measure(x).min_mem_limit("remat"), mode="remat")
    assert all(map(torch.equal, trained(plain, optimizer_of(plain), 1), trained(model, optimizer_of(model), 1)))
    for one in (*plain.modules(), *model.modules()):
        one.on = True
    if what == "a buffer":
        before = [tensor.clone() for tensor in model.state_dict().values()]
        with pytest.raises(rotoff.ExecutionError, match="the code of Later changed in place.*run the forward again"):
            model(x).sum().backward()
        model.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
        model.zero_grad()
    assert all(map(torch.equal, trained(plain, optimizer_of(plain), 1), trained(model, optimizer_of(model), 1)))


@pytest.mark.parametrize("how", ["function, norm", "adjoint, function, norm"])
def test_one_step_off_its_course_may_call_modules_that_draw_several_times(how: str) -> None:
    plain = switched(Switched, how)
    for layer in (one for one in plain.modules() if isinstance(one, Switched)):
        layer.f.insert(0, Counting())
    model = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None)
    model.compute_sequence(model.measure(torch.zeros(64, 8)).min_mem_limit("remat"), mode="remat")

    def run(model: Any) -> list[Any]:
        torch.manual_seed(1)
        random.seed(0)
        np.random.seed(0)
        for layer in model.modules():
            layer.on = True
        model(torch.randn(64, 8)).square().mean().backward()
        counted = [torch.tensor(one.seen) for one in model.modules() if isinstance(one, Counting)]
        return [*(p.grad for p in model.parameters()), *model.buffers(), *counted]

    assert all(map(torch.equal, run(plain), run(model)))


@pytest.mark.parametrize("updates", ["after", "during"])
def test_a_course_may_come_to_have_them_where_parameters_are_moved(updates: str) -> None:
    plain, model = (
        switched(Switched, "module"),
        rotoff.Checkpointable(switched(Switched, "module"), cache_directory=None),
    )
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"optimizer": optimizer, "updates": updates, "refine": False}
    with pytest.raises(rotoff.InfeasibleError) as refused:
        model.measure(torch.zeros(64, 8)).compute_sequence(device_limit=1, **options)
    model.compute_sequence(device_limit=2 * refused.value.min_mem_limit, **options)
    assert all(map(torch.equal, switched_run(plain, optimizer_of(plain)), switched_run(model, optimizer)))


class Noise(torch.autograd.Function):
    """Its own code draws the factor of its input."""

    drawn: Callable[[], float] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = 1.0 if Noise.drawn is None else 0.5 + Noise.drawn()
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.factor


@torch.library.custom_op("rotoff_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    assert Noise.drawn is not None
    return x * (0.5 + Noise.drawn())


noise.register_fake(torch.empty_like)
noise.register_autograd(
    lambda ctx, gradient: gradient * ctx.factor,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", output / inputs[0]),
)


def filled(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty(x.shape[-1]).apply_(lambda _: 0.5 + Noise.drawn())  # type: ignore[misc]


CALLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a Function": lambda x: Noise.apply(x),
    "an operator": noise,
    "apply_": filled,
}


class Noisy(nn.Module):
    what = "a Function"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.on = nn.Linear(32, 128), nn.Linear(128, 32), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x * random.random())
        return self.last(torch.tanh(CALLED[self.what](x) if self.on else x))


def noisy_run(model: Any, on: bool = True) -> list[torch.Tensor]:
    random.seed(0)
    np.random.seed(0)
    optimizer, found = optimizer_of(model), []
    for n in range(2):
        for layer in model.modules():
            if isinstance(layer, Noisy):
                layer.on = on or n > 0
        found += trained(model, optimizer, 1)
    return [*found, torch.tensor([random.random(), np.random.rand()])]


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), *[Noisy() for _ in range(4)])


@pytest.mark.parametrize("drawn", [random.random, np.random.rand], ids=["Python", "NumPy"])
@pytest.mark.parametrize("when", ["measured before", "measured in the first step", "not measured"])
@pytest.mark.parametrize("what", CALLED)
def test_replays_of_code_that_is_not_seen_draw_what_its_first_run_drew(
    drawn: Callable[[], float], when: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noise, "drawn", drawn)
    monkeypatch.setattr(Noisy, "what", what)
    model, other = (rotoff.Checkpointable(noisy(), cache_directory=None) for _ in range(2))
    on, x = when != "not measured", torch.zeros(64, 8)
    for layer in model.modules():
        layer.on = on
    limits = [one.measure(x).min_mem_limit("remat") for one in ([other] if "first step" in when else [model, other])]
    model.compute_sequence(max(limits), mode="remat")
    assert all(map(torch.equal, noisy_run(noisy(), on), noisy_run(model, on)))


def test_a_function_that_begins_to_draw_ends_in_an_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Later", (Noise,), {})  # of which nothing is known yet
    monkeypatch.setattr(Noisy, "forward", lambda self, x: self.last(torch.tanh(kind.apply(self.first(x)))))
    x, plain, model = torch.randn(64, 8), noisy(), rotoff.Checkpointable(noisy(), cache_directory=None)
    model.compute_sequence(model.measure(x).min_mem_limit("remat"), mode="remat")
    model(x).sum().backward()
    monkeypatch.setattr(Noise, "drawn", random.random)
    random.seed(0)
    with pytest.raises(rotoff.ExecutionError, match="Later.*generator of Python or NumPy.*run the step again"):
        model(x).sum().backward()
    left = random.random()
    random.seed(0)
    assert left == [random.random() for _ in range(5)][-1]
    for one in (plain, model):
        one.zero_grad()
        random.seed(0)
        one(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
