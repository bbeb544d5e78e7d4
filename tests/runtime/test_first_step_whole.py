"""Modules that are called as a whole, or have hooks in their graph, in the step that measures: outside of the model all
is as under the plain model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rotoff

WIDTH = 32


class Outward(nn.Module):
    """Counts, takes and draws outside of the model."""

    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.world = lambda: world

    def outside(self) -> float:
        world = self.world()
        world["calls"] += 1
        return float(1 + 0.01 * next(world["numbers"]) + 0.01 * world["calls"] + 0.1 * world["random"].random())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.outside()


class Experts(Outward):
    """A loop over the experts in use, each on the rows sent to it; which, goes by noise, too."""

    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__(world)
        self.drop, self.experts = nn.Dropout(0.3), nn.ModuleList(Outward(world) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.drop(super().forward(x))[:, :3] + 0.01 * self.seen
        chosen = (scores + torch.rand(3)).argmax(1)
        self.seen += 1
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero()[:, 0]
            if len(rows):
                out[rows] = expert(x[rows])
        used = chosen < 2
        kept = x[used] * 0.5
        out[used] = out[used] + kept[: int(used.sum())]
        return x + out


class Packs(Outward):
    """A recurrent layer on sequences of lengths that it computes."""

    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__(world)
        self.rows = nn.GRU(WIDTH // 8, WIDTH // 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x).view(len(x), 8, -1)
        lengths = 1 + (x.detach().sum(2) > 0).sum(1).clamp(max=7)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rows(packed)[0], batch_first=True, total_length=8)[0].reshape(len(x), WIDTH)


def hooked(world: dict[str, Any], register: Callable[..., Any]) -> nn.Module:
    module = nn.Sequential(Outward(world), nn.Linear(WIDTH, WIDTH), Outward(world))
    register(module)
    return module


def halved(world: dict[str, Any]) -> Callable[..., Any]:
    def hook(module: nn.Module, *gradients: Any) -> Any:
        world["calls"] += 1
        return tuple(None if g is None else g * (0.5 + 0.01 * world["calls"]) for g in gradients[0])

    return hook


class OfNodes(Outward):
    """Registers hooks on nodes of its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        world, x = self.world(), super().forward(x)

        def count(*_: Any) -> None:
            world["calls"] += 1

        x.grad_fn.register_hook(count)
        x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 1.5,))
        x.grad_fn.register_hook(count).remove()
        assert isinstance(x.grad_fn, torch.autograd.graph.Node)
        return x if x.grad_fn.name().startswith("Mul") else x * 0


class Leaves(Outward):
    """Leaves a tensor of its graph outside of the model, for the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.world()["left"].append(x.square().mean())
        x.register_hook(lambda gradient: gradient * 1.5)
        return x


def with_numbers(world: dict[str, Any]) -> Callable[..., Any]:
    return lambda module, args, output: output * (1 + 0.01 * next(world["numbers"]))


class Mapped(Outward):
    def __init__(self, world: dict[str, Any]) -> None:
        super().__init__(world)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.vmap(self.inner)(x)


class Around(nn.Module):
    """`part` in the midst of others."""

    def __init__(self, world: dict[str, Any], part: Callable[[dict[str, Any]], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Outward(world), Outward(world), part(world), Outward(world), part(world)])
        self.norm, self.last = nn.BatchNorm1d(WIDTH), Outward(world)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.last(self.norm(x)).sum(1)


def steps(model: nn.Module, run: nn.Module, world: dict[str, Any], optimizer: Any = None) -> list[Any]:
    shown: list[Any] = []
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for n in range(4):
        torch.manual_seed(n)
        loss = run(torch.randn(64, WIDTH)).square().mean()
        (loss + sum(world["left"])).backward()
        world["left"].clear()
        optimizer.step()
        optimizer.zero_grad()
        shown += [loss.detach(), world["calls"], torch.get_rng_state()]
    return [*shown, next(world["numbers"]), world["random"].random(), *model.parameters(), *model.buffers()]


PARTS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "experts": Experts,
    "leaves": Leaves,
    "forward hook": lambda world: hooked(world, lambda m: m.register_forward_hook(with_numbers(world))),
    "packed": Packs,
    "full backward hook": lambda world: hooked(world, lambda m: m.register_full_backward_hook(halved(world))),
    "full backward pre-hook": lambda world: hooked(world, lambda m: m.register_full_backward_pre_hook(halved(world))),
    "backward hook": lambda world: hooked(world, lambda m: m[1].register_backward_hook(halved(world))),
    "hooks of nodes": OfNodes,
    "mapped": Mapped,
    "compiled": lambda world: torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager"),
}


def made(part: str, sequential: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    world = {"calls": 0, "numbers": itertools.count(), "random": random.Random(0), "left": []}
    model: nn.Module = Around(world, PARTS[part])
    if sequential:
        model = nn.Sequential(*model.parts, model.norm, model.last)  # type: ignore[misc, arg-type]
    return model, world


def check_same(ours: list[Any], theirs: list[Any]) -> None:
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got, wanted) if isinstance(got, torch.Tensor) else got == wanted


@pytest.mark.filterwarnings("ignore:.*non-full backward hook:FutureWarning")
@pytest.mark.parametrize("mode", ["remat", "joint"])
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.grid
def test_outside_of_the_model_all_is_as_under_the_plain_one(part: str, sequential: bool, mode: str) -> None:
    probe = rotoff.Checkpointable(made(part, sequential)[0], cache_directory=None)
    probe.measure(torch.randn(64, WIDTH), repeats=1)
    limit = probe.min_mem_limit(mode)
    limit += (probe.keep_all_memory - limit) // 4
    assert limit < probe.keep_all_memory
    probe.close()
    model, world = made(part, sequential)
    run = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(limit, mode=mode)
    ours = steps(model, run, world)
    assert not run._plan.keeps_all
    run.close()
    model, world = made(part, sequential)
    check_same(ours, steps(model, model, world))


@pytest.mark.filterwarnings("ignore:.*non-full backward hook:FutureWarning")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.grid
def test_so_it_is_where_parameters_move(part: str) -> None:
    probe, _ = made(part)
    run = rotoff.Checkpointable(probe, cache_directory=None).measure(torch.randn(64, WIDTH), repeats=1)
    with pytest.raises(rotoff.InfeasibleError) as least:
        run.compute_sequence(device_limit=1, optimizer=torch.optim.SGD(probe.parameters(), 0.05, momentum=0.9))
    run.close()
    model, world = made(part)
    run, optimizer = rotoff.Checkpointable(model, cache_directory=None), torch.optim.SGD(model.parameters(), 0.05, 0.9)
    run.compute_sequence(device_limit=int(1.3 * least.value.min_mem_limit), optimizer=optimizer)
    ours = steps(model, run, world, optimizer)
    assert run._plan.placed is not None
    run.close()
    model, world = made(part)
    check_same(ours, steps(model, model, world))


class Mapped(nn.Module):
    """Counts in a buffer and in an attribute; torch.func maps a part of it, so that it is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return torch.func.vmap(torch.sin)(self.linear(x)) * (1 + self.seen + 0.1 * self.calls)


def test_what_is_called_again_in_the_first_step_counts_once_in_replays_too() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Mapped() for _ in range(6)], nn.Linear(WIDTH, 1))

    x = torch.randn(64, WIDTH)
    plain, net = made(), made()
    limit = rotoff.Checkpointable(made(), cache_directory=None).measure(x, repeats=1).min_mem_limit("remat")
    wrapped = rotoff.Checkpointable(net, cache_directory=None).compute_sequence(limit, mode="remat", refine=False)
    for _ in range(2):
        for model in (plain, wrapped):
            model(x).sum().backward()
        assert wrapped._plan.replayed
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), net.parameters(), strict=True))
        assert [one.calls for one in net[:6]] == [one.calls for one in plain[:6]]
    wrapped.close()
