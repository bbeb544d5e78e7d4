"""Plans that move parameters: within a share of what they need, and of models whose steps are too small for a limit to
ask for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import rotoff
from rotoff.planning.step_planner import compiled
from rotoff.planning.tape_placed_runner import PlacedRunner


def runner_of(model: Any) -> PlacedRunner:
    """What runs the steps of `model`."""
    runner: PlacedRunner = model._steps
    return runner


Share = float | Callable[[rotoff.Chain, str], rotoff.Sequence]


def within(chain: rotoff.Chain, share: float, updates: str) -> rotoff.Sequence:
    """A plan within a share of the way from the smallest limit to keeping everything."""
    low = rotoff.min_mem_limit(chain, "joint", updates)
    high = rotoff.simulate(chain, rotoff.keep_all(chain, updates), updates=updates).peak_bytes
    return rotoff.solve(chain, int(low + share * (high - low)), refine=False, updates=updates)


def force(model: Any, optimizers: Any, share: Share, host: bool = False, updates: str = "after") -> None:
    """Place everything as in so little memory that a small model's generator states would not fit beside it. share: or
    what makes the plan."""
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers, refine=False, updates=updates)
    runner = runner_of(model)
    assert runner.request is not None and runner.latest is not None
    ways = runner.ways(runner.latest)
    groups = next(one for one in ways if any(g.host_update_time is not None for g in one.chain.parameters) == host)
    sequence = share(groups.chain, updates) if callable(share) else within(groups.chain, share, updates)
    runner.latest.plan = compiled(runner.latest.profile, groups, sequence, runner.request)


def least(model: rotoff.Checkpointable, **options: Any) -> int:
    """The smallest `device_limit`."""
    with pytest.raises(rotoff.InfeasibleError) as refused:
        model.compute_sequence(device_limit=1, **options)
    return refused.value.min_mem_limit


def place(model: rotoff.Checkpointable, optimizers: list[Optimizer], share: float, **options: Any) -> int:
    """Plan within a `share` of the way from the smallest limit to that of everything; returns the limit."""
    options = {"refine": False, "optimizer": optimizers, **options}
    smallest = least(model, **options)
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers)
    limit = int(smallest + share * (model.keep_all_memory - 1 - smallest))
    model.compute_sequence(device_limit=limit, **options)
    assert model._plan.placed is not None
    return limit


def adamw(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [torch.optim.AdamW(parameters, lr=1e-2)]


Pairs = list[tuple[Any, Any, list[Optimizer]]]


def twins(
    net: nn.Module, *batch: Any, updates: str = "after", share: Share = 0.0, make: Any = adamw, plan: Any = force,
    device: str | None = None, copied: Callable[[nn.Module], nn.Module] = copy.deepcopy,
) -> Pairs:  # fmt: skip
    """A model as it is and a copy under a plan: the model, what is called, and the optimizers. device: where the plain
    model is, and the planned one's steps run, if not where they are."""
    model = copied(net)
    run = rotoff.Checkpointable(model, device=device).measure(*batch, repeats=1)
    model.zero_grad()
    if device is not None:
        net.to(device)
    own, others = (make([p for p in one.parameters() if p.requires_grad]) for one in (model, net))
    plan(run, own, share, updates=updates)
    return [(net, net, others), (model, run, own)]


def alike(pairs: Pairs) -> bool:
    """Whether both have the same parameters."""
    return all(map(torch.equal, pairs[0][0].parameters(), pairs[1][0].parameters()))


def added_up(model: nn.Module, optimizers: list[Optimizer], x: torch.Tensor) -> None:
    """A step whose loss takes nothing."""
    model(x).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
