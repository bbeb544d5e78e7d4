"""Modules that run as a whole: their replays find what their first runs found, whatever became of it since."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import rotoff

Model = Any  # plain or planned
Make = Callable[[], nn.Module]
Forward = Callable[[Model, torch.Tensor], torch.Tensor]


class Mapped(nn.Module):
    """Runs as a whole, since it uses ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(32, 32), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda one: one.sin())(self.act(self.linear(x)))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.up, self.down = inner, nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.inner(x)).relu())


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), backend="eager")  # type: ignore[return-value]


def scripted(kind: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(kind())  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("shift", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x) + self.shift)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.number, self.rate = nn.Linear(32, 32), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.rate = self.rate * 0.5
        return torch.relu(self.linear(x)) * (1.0 + self.number + self.rate)


def model_of(inner: Make) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), *(Block(inner()) for _ in range(3)))


def trained(model: Model, forward: Forward) -> list[torch.Tensor]:
    """Losses, and what four steps leave."""
    torch.manual_seed(1)
    random.seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = forward(model, torch.randn(64, 8)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    counts = [m.number for m in model.modules() if hasattr(m, "number")]
    return [*losses, torch.tensor(counts), *(tensor.clone() for tensor in model.state_dict().values())]


def first_block(model: Model) -> Block:
    return next(module for module in model.modules() if isinstance(module, Block))


def hook_removed(model: Model, x: torch.Tensor) -> torch.Tensor:
    handle = first_block(model).inner.register_forward_hook(lambda _module, _args, result: result * 2)
    result: torch.Tensor = model(x)
    handle.remove()
    return result


def hook_added(model: Model, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    handle = first_block(model).inner.register_forward_hook(lambda _module, _args, result: result * 2)
    result.register_hook(lambda _gradient: None)
    model.handles = [*getattr(model, "handles", ()), handle]
    if len(model.handles) > 1:
        model.handles.pop(0).remove()
    return result


def functional(model: Model, x: torch.Tensor) -> torch.Tensor:
    scaled = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, scaled, (x,))  # type: ignore[no-any-return]


def submodule_swapped(model: Model, x: torch.Tensor) -> torch.Tensor:
    inner = first_block(model).inner
    own, inner.act = inner.act, nn.Sigmoid()
    result: torch.Tensor = model(x)
    inner.act = own
    return result


class Ensemble(nn.Module):
    """Runs its members at once, by ``functional_call`` within ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {k: torch.stack([m.get_parameter(k) for m in self.members]) for k in ("weight", "bias")}
        call = torch.func.vmap(torch.func.functional_call, in_dims=(None, 0, None))
        return call(self.members[0], weights, (x,)).mean(0)  # type: ignore[no-any-return]


class Film(Mapped):
    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor | None = None
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.scale is None else self.scale) + self.shift


class Conditioned(nn.Module):
    """Sets an attribute or a buffer of a module that runs as a whole. how: which, and whether it stays there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.film, self.condition, self.how = Film(), nn.Linear(32, 32), how
        if "compiled" in how:
            self.film = torch.compile(self.film, backend="eager")  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.condition(x).mean(0)
        if "functional" in self.how:
            return torch.func.functional_call(self.film, {"shift": condition}, (x,))  # type: ignore[no-any-return]
        film = getattr(self.film, "_orig_mod", self.film)
        if "buffer" in self.how:
            film.shift = condition.detach() if "detached" in self.how else condition
        else:
            film.scale = condition
        x = self.film(x)
        if "left" not in self.how:
            film.scale, film.shift = None, torch.zeros(32)
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(32, 32), torch.ones(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale


class ScriptedCondition(nn.Module):
    """Sets an attribute of a scripted module, which lies outside of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.condition = scripted(Scaled), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaled.scale = self.condition(x).mean(0)
        x = self.scaled(x)
        self.scaled.scale = torch.ones(32)
        return x


class Cell(Mapped):
    """Keeps its state, with its graph, for its next call."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = super().forward(x if self.state is None else x + self.state)
        return self.state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell.state = None
        for _ in range(3):
            x = self.cell(x)
        self.cell.state = None
        return x


def with_buffers(model: Model, x: torch.Tensor) -> torch.Tensor:
    shifted = {name: buffer + 0.1 for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, shifted, (x,))  # type: ignore[no-any-return]


HOWS = [
    "attribute",
    "attribute, left",
    "attribute, compiled",
    "buffer",
    "buffer, left",
    "buffer, detached",
    "functional",
]
CASES = {
    **{how: (partial(Conditioned, how), nn.Module.__call__) for how in HOWS},
    "attribute, scripted": (ScriptedCondition, nn.Module.__call__),
    "a state": (Recurrent, nn.Module.__call__),
    "functional_call with buffers": (Film, with_buffers),
    "an ensemble": (Ensemble, nn.Module.__call__),
    "hook removed, mapped": (Mapped, hook_removed),
    "hook removed, compiled": (compiled, hook_removed),
    "hook added, mapped": (Mapped, hook_added),
    "functional_call, mapped": (Mapped, functional),
    "functional_call, compiled": (compiled, functional),
    "submodule swapped": (Mapped, submodule_swapped),
    "scripted, with batch norm": (lambda: scripted(Normed), nn.Module.__call__),
    "scripted, with a buffer": (lambda: scripted(Shifted), with_buffers),
    "scripted, with attributes": (lambda: scripted(Counted), nn.Module.__call__),
}


@pytest.mark.parametrize("mode", ["remat", "joint"])
@pytest.mark.parametrize("case", CASES)
def test_a_replay_finds_the_module_of_the_first_run(case: str, mode: str) -> None:
    inner, forward = CASES[case]
    model = rotoff.Checkpointable(model_of(inner), cache_directory=None)
    model.compute_sequence(model.measure(torch.zeros(64, 8)).min_mem_limit(mode), mode=mode)
    assert all(map(torch.equal, trained(model_of(inner), forward), trained(model, forward)))


@pytest.mark.parametrize("case", CASES)
def test_a_first_step_may_measure_them(case: str) -> None:
    inner, forward = CASES[case]
    model = rotoff.Checkpointable(model_of(inner), cache_directory=None).compute_sequence("1 MiB", mode="remat")
    assert all(map(torch.equal, trained(model_of(inner), forward), trained(model, forward)))


class Remembering(Mapped):
    """Keeps its last result with its graph."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.last = reads, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.last.detach().mean() if self.reads and self.last is not None else 0.0
        self.last = super().forward(x * (1 + factor))
        return self.last  # type: ignore[return-value]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Remembering(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [lambda: Remembering(False), Twice])
def test_an_attribute_with_a_graph_that_is_only_set(kind: Make, first: bool) -> None:
    model = rotoff.Checkpointable(model_of(kind), cache_directory=None)
    if not first:
        model.measure(torch.zeros(64, 8))
    model.compute_sequence("1 MiB" if first else model.min_mem_limit("remat"), mode="remat")
    expected = trained(model_of(kind), nn.Module.__call__)
    assert all(map(torch.equal, expected, trained(model, nn.Module.__call__)))


def test_a_replay_that_would_read_a_result_of_the_step_before_is_refused() -> None:
    model = rotoff.Checkpointable(model_of(lambda: Remembering(True)), cache_directory=None)
    model.compute_sequence(model.measure(torch.zeros(64, 8)).min_mem_limit("remat"), mode="remat")
    with pytest.raises(rotoff.ExecutionError, match=r"'last' of Remembering.*detach"):
        trained(model, nn.Module.__call__)


class Seeded(Mapped):
    """Its arguments change while it runs."""

    def forward(self, x: torch.Tensor, generator: torch.Generator, seen: list[int]) -> torch.Tensor:  # type: ignore[override]
        seen.append(len(seen))
        return super().forward(x * torch.rand(32, generator=generator) * len(seen))


class Seeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator, self.number = Seeded(), torch.Generator().manual_seed(5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.number]
        result: torch.Tensor = self.inner(x, self.generator, seen)
        self.number += len(seen)
        return result


@pytest.mark.parametrize("first", [False, True])
def test_measuring_finds_the_arguments_of_the_call(first: bool) -> None:
    model = rotoff.Checkpointable(model_of(Seeding), cache_directory=None)
    if not first:
        model.measure(torch.zeros(64, 8))
    model.compute_sequence("1 MiB" if first else model.min_mem_limit("remat"), mode="remat")
    assert all(map(torch.equal, trained(model_of(Seeding), nn.Module.__call__), trained(model, nn.Module.__call__)))


class Late(Mapped):
    """Begins to use ``vmap`` after it was measured."""

    maps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.maps else self.linear(x)


def test_one_that_begins_to_map_is_refused_until_it_is_measured_again() -> None:
    model, x = rotoff.Checkpointable(model_of(Late), cache_directory=None), torch.randn(64, 8)
    model.compute_sequence(model.measure(x).min_mem_limit("remat"), mode="remat")
    model(x).sum().backward()
    first_block(model).inner.maps = True
    with pytest.raises(rotoff.ExecutionError, match=r"transform of torch.func.*model.measure\(\*sample\) again"):
        model(x)
    model.compute_sequence(model.measure(x).min_mem_limit("remat"), mode="remat")
    model(x).sum().backward()


class Scaling(Conditioned):
    """Begins to give its module parameters of its own making after it was measured."""

    scales = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.scales:
            return self.film(x)
        made = {"linear.weight": self.film.linear.weight * 2}
        return torch.func.functional_call(self.film, made, (x,))  # type: ignore[no-any-return]


def test_parameters_made_in_the_forward_need_a_measurement_with_them() -> None:
    plain = model_of(lambda: Scaling(""))
    model, x = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None), torch.randn(64, 8)
    model.compute_sequence(model.measure(x).min_mem_limit("remat"), mode="remat")
    for one in (*plain.modules(), *model.modules()):
        if isinstance(one, Scaling):
            one.scales = True
    with pytest.raises(rotoff.ExecutionError, match=r"functional_call.*model.measure\(\*sample\) again"):
        model(x)
    model.compute_sequence(model.measure(x).min_mem_limit("remat"), mode="remat")
    assert all(map(torch.equal, trained(plain, nn.Module.__call__), trained(model, nn.Module.__call__)))


class Linked(nn.Sequential):
    """Its second block reads, through a dictionary, what a hook has taken from the first one."""

    def __init__(self) -> None:
        taken: dict[str, torch.Tensor] = {}

        class Reading(Mapped):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + taken.pop("result")

        super().__init__(nn.Linear(8, 32), Block(Mapped()), Block(Mapped()), Block(Reading()))
        self[1].inner.register_forward_hook(lambda _module, _args, result: taken.update(result=result))


def test_what_it_reads_from_another_part_of_the_model_is_refused() -> None:
    model = rotoff.Checkpointable(Linked(), cache_directory=None)
    with pytest.raises(rotoff.MeasureError, match=r"'3.inner', which runs as a whole, read a tensor.*as an argument"):
        model.measure(torch.zeros(64, 8))


class Dual(Mapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.func.jvp(super().forward, (x,), (torch.ones_like(x),)))  # type: ignore[return-value]


def test_forward_mode_is_refused() -> None:
    with pytest.raises(rotoff.MeasureError, match=r"jvp"):
        rotoff.Checkpointable(model_of(Dual), cache_directory=None).measure(torch.zeros(64, 8))


class Normal(Mapped):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.BatchNorm1d(32)  # type: ignore[assignment]


class Turning(nn.Module):
    """Calls its blocks in another order in each step; one of them runs as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.start = nn.ModuleList(Block(kind()) for kind in (nn.Tanh, nn.Tanh, Normal, nn.Tanh)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start += 1
        for n in range(4):
            x = self.blocks[(self.start + n) % 4](x)
        return x


@pytest.mark.parametrize("mode", ["remat", "joint"])
def test_they_may_be_called_in_other_stages(mode: str) -> None:
    torch.manual_seed(0)
    plain, x = Turning(), torch.randn(64, 32)
    model = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None)
    model.compute_sequence(model.measure(x).min_mem_limit(mode), mode=mode)
    for n in range(4):
        for one in (plain, model):
            loss = one(x * n).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()  # recomputes, also off the planned course
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
