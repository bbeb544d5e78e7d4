"""Plans that move parameters of models whose steps are too small for a limit to ask for it."""

from __future__ import annotations

from typing import Any

import rotoff
from rotoff.planning.tape_placed_planner import PlacedStepPlan, compiled
from rotoff.planning.tape_placed_runner import PlacedRunner


def runner_of(model: Any) -> PlacedRunner:
    """What runs the steps of `model`."""
    runner: PlacedRunner = model._steps
    return runner


def force(model: Any, optimizers: Any, share: float, host: bool = False, updates: str = "after") -> None:
    """Place everything as in so little memory that a small model's generator states would not fit beside it."""
    model.compute_sequence(device_limit="1 TiB", optimizer=optimizers, refine=False, updates=updates)
    runner = runner_of(model)
    assert runner.request is not None and runner.latest is not None
    ways = runner.ways(runner.latest)
    groups = next(one for one in ways if any(g.host_update_time is not None for g in one.chain.parameters) == host)
    low = rotoff.min_mem_limit(groups.chain, "joint", updates)
    high = rotoff.simulate(groups.chain, rotoff.keep_all(groups.chain, updates), updates=updates).peak_bytes
    sequence = rotoff.solve(groups.chain, int(low + share * (high - low)), refine=False, updates=updates)
    runner.latest.plan = PlacedStepPlan(groups, compiled(groups, sequence, runner.request))
