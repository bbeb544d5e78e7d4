"""The step that measures a model runs its forward once, and is the plain model's."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from models import ALL, fresh, train
from step_by_step import works
from torch import nn

import rotoff


def limit_of(model: nn.Module, batch: Any) -> int:
    """A little above the smallest."""
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(batch())
    least = probe.min_mem_limit()
    limit = least + (probe.keep_all_memory - least) // 5
    probe.close()
    return limit


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.grid
def test_the_first_step_is_planned_and_on_its_course(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = fresh(kind)
    limit = limit_of(model, batch)
    wrapped = rotoff.Checkpointable(copy.deepcopy(model)).compute_sequence(limit, refine=False)
    ours, theirs = train(wrapped, batch), train(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "another course" not in caplog.text
    assert len(wrapped.plans()) == 1
    wrapped.close()


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

    whole, x = Whole(), torch.randn(16, 8)
    run = rotoff.Checkpointable(whole).compute_sequence(1)
    run(x).sum().backward()  # the first step records itself
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    drawn = torch.get_rng_state()
    with pytest.raises(rotoff.InfeasibleError):
        run(x)
    assert whole.steps == 1
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
    assert works(run.sequence)


def test_a_leaf_made_by_setting_requires_grad_is_freed() -> None:
    leaves: list[weakref.ref[torch.Tensor]] = []

    class Leaf(Odd):
        def forward(self, x: torch.Tensor) -> Any:
            x = x[None]
            x.requires_grad = True
            leaves.append(weakref.ref(x))
            return super().forward(x[0])

    torch.manual_seed(0)
    plain = steps_of(other := Leaf(""), other)
    torch.manual_seed(0)
    model = Leaf("")
    run = rotoff.Checkpointable(model).compute_sequence(LITTLE)
    for ours, theirs in zip(steps_of(model, run), plain, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert works(run.sequence)
    assert [one() for one in leaves] == [None] * len(leaves)


class Tied(nn.Module):
    """Uses one weight three times: twice as a table, and once in a linear layer, for which autocast casts it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = 3 * self.table(tokens)
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (0.7 * self.table(tokens.flip(0)) if n == 1 else 0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_gradients_of_a_weight_that_autocast_casts_are_added_up_in_the_plain_order() -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 50, (16, 32))

    def gradients(run: nn.Module) -> list[torch.Tensor | None]:
        run.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(tokens)
        loss.backward()
        return [p.grad for p in run.parameters()]

    plain = gradients(copy.deepcopy(model))
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None)
    with torch.autocast("cpu", torch.bfloat16):
        limit = (probe.measure(tokens).min_mem_limit() + probe.keep_all_memory) // 2
    run = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(limit)
    for _ in range(3):
        assert all(map(torch.equal, gradients(run), plain))
    assert works(run.sequence)
