"""The step that measures a model runs its forward once, and is the plain model's."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import ALL, fresh, train
from torch import nn

import rotoff
from rotoff.runtime import taped_forward


def limit_of(model: nn.Module, batch: Any) -> int:
    """A little above the smallest."""
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(batch(), repeats=1)
    least = probe.min_mem_limit()
    limit = least + (probe.keep_all_memory - least) // 5
    probe.close()
    return limit


@pytest.mark.parametrize("kind", ALL)
def test_the_first_step_is_planned_and_on_its_course(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh(kind)
    limit = limit_of(model, batch)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model)).compute_sequence(limit, refine=False)
    ours, theirs = train(wrapped, batch), train(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "another course" not in caplog.text
    assert len(wrapped.plans()) == 1
    wrapped.close()


class Counted(nn.Module):
    """Its forward takes from an iterator, and leaves tensors of its graph in a list; neither is the module's."""

    def __init__(self, numbers: Iterator[int], left: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.world = lambda: (numbers, left)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, left = self.world()
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (1 + 0.01 * next(numbers))
            if n == 2:
                left.append(x.square().mean())
                x.register_hook(lambda gradient: gradient * 1.5)
        return x.sum()


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
def test_what_a_forward_takes_and_leaves_elsewhere_is_as_in_the_plain_model(mode: str) -> None:
    def trained(plan: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        left: list[torch.Tensor] = []
        model = Counted(itertools.count(), left)
        run: nn.Module = model
        if plan is not None:
            run = rotoff.Checkpointable(model).compute_sequence(plan, mode=mode)
        for n in range(3):
            torch.manual_seed(n)
            loss = run(torch.randn(64, 32))
            (loss + left.pop()).backward()
        assert not left
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    probe = rotoff.Checkpointable(Counted(itertools.count(), [])).measure(torch.randn(64, 32))
    limit = probe.min_mem_limit(mode) + 4096
    assert limit < probe.keep_all_memory
    assert all(torch.equal(a, b) for a, b in zip(trained(limit), trained(None), strict=True))


class Outward(nn.Module):
    """One module of many: counts, draws and leaves what it made, all outside of the model."""

    def __init__(self, world: dict[str, Any], number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.world = lambda: world
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world = self.world()
        world["calls"] += 1
        x = torch.tanh(self.linear(x)) * (1 + 0.01 * next(world["numbers"])) + 0.01 * world["calls"]
        x = x * world["random"].random()
        if self.number == 2:
            world["left"].append(x.square().mean())
        return x


def outward() -> tuple[nn.Sequential, dict[str, Any]]:
    torch.manual_seed(0)
    world = {"calls": 0, "numbers": itertools.count(), "random": random.Random(0), "left": []}
    every = [Outward(world, n) for n in range(6)]
    every[3].register_forward_hook(lambda module, args, output: output * (1 + 0.01 * next(world["numbers"])))
    return nn.Sequential(every[0], nn.Sequential(*every[1:4]), nn.Dropout(0.2), *every[4:]), world


@pytest.mark.parametrize("mode", ["remat", "offload", "joint"])
def test_the_modules_of_a_sequential_are_called_once_in_the_step_that_measures_them(mode: str) -> None:
    def trained(plan: int | None) -> list[Any]:
        run, world = outward()
        plain: nn.Module = run
        if plan is not None:
            run = rotoff.Checkpointable(run).compute_sequence(plan, mode=mode)
        told: list[Any] = []
        for n in range(3):
            torch.manual_seed(n)
            loss = run(torch.randn(64, 32)).sum()
            (loss + sum(world["left"])).backward()
            world["left"].clear()
            told += [loss.detach(), world["calls"]]
        assert plan is None or run.strategy == "the modules of an nn.Sequential"
        return [*told, world["random"].random(), *(p.grad for p in plain.parameters())]

    probe = rotoff.Checkpointable(outward()[0]).measure(torch.randn(64, 32))
    limit = probe.min_mem_limit(mode) + 4096
    assert limit < probe.keep_all_memory
    ours, theirs = trained(limit), trained(None)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ours, theirs, strict=True))


def test_a_limit_that_is_too_small_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.inner(x)

    whole = Whole()
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(rotoff.InfeasibleError):
        rotoff.Checkpointable(whole).compute_sequence(1)(torch.randn(16, 8, generator=torch.Generator()))
    assert whole.steps == 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.state_dict().items())


LITTLE = 80_000  # bytes; `Odd` keeps about 118,000, and needs 63,000


class Cell(nn.Module):
    """Counts its calls, and those of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(64, 64), nn.BatchNorm1d(64), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.norm(self.linear(x)))


class Odd(nn.Module):
    """Does after its third cell what `does` says; `left` is not the module's."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.cells, self.does = nn.ModuleList(Cell() for _ in range(6)), does
        self.left: list[Any] = []
        self.world = lambda: self.left
        if does == "scripted":
            self.cells[2] = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))

    def forward(self, x: torch.Tensor) -> Any:
        for n, cell in enumerate(self.cells):
            x = cell(x)
            if n == 2 and self.does == "hook removed":
                x.register_hook(lambda gradient: gradient * 3).remove()
            if n == 2 and self.does == "hook kept":
                self.world().append(x.register_hook(lambda gradient: gradient * 3))
            if n == 2 and self.does == "told of a tensor elsewhere":
                mean = x.mean()
                mean.told = "mean"
                self.world().append(mean)
        out = x.sum()
        if self.does == "told of the result":
            out.told = [1, 2]
        return (out, [out]) if self.does == "the same twice" else out


def steps_of(model: Odd, run: nn.Module) -> list[Any]:
    """What each of four steps shows of itself, and the parameters and buffers after them."""
    shown: list[Any] = []
    for n in range(4):
        torch.manual_seed(n)
        loss = run(torch.randn(32, 64))
        if model.does == "the same twice":
            shown.append(loss[0] is loss[1][0])
            loss = loss[0]
        shown += [loss.detach(), getattr(loss, "told", None)]
        while model.left:
            one = model.left.pop()
            if isinstance(one, torch.Tensor):
                shown.append(one.told)
                loss = loss + one
            else:
                one.remove()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return [*shown, *model.parameters(), *model.buffers(), *(getattr(cell, "calls", None) for cell in model.cells)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "does",
    ["scripted", "hook removed", "hook kept", "told of the result", "told of a tensor elsewhere", "the same twice"],
)
def test_handles_attributes_and_scripted_modules_are_as_in_the_plain_model(does: str) -> None:
    torch.manual_seed(0)
    model = Odd(does)
    torch.manual_seed(0)
    plain = steps_of(other := Odd(does), other)
    run = rotoff.Checkpointable(model).compute_sequence(LITTLE)
    for ours, theirs in zip(steps_of(model, run), plain, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert not run._plan.keeps_all


def test_a_failure_in_the_planned_forward_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Odd("")
    run = rotoff.Checkpointable(model).compute_sequence(LITTLE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    with monkeypatch.context() as patched:
        patched.setattr(taped_forward.TapedForward, "again", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(torch.randn(32, 64, generator=torch.Generator()))
    assert [cell.calls for cell in model.cells] == [0] * 6
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    run(torch.randn(32, 64)).backward()
    assert [cell.calls for cell in model.cells] == [1] * 6
