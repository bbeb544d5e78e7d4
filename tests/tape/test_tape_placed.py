"""Steps on tapes by plans that move parameters, gradients and optimizer states: the bits of the plain model, at most
the predicted bytes, and nothing of it in the caller's hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from allocated import own_again, peak_bytes
from models import ALL
from placed_loops import result
from placed_models import MODELS, drawn
from random_programs import mutants
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import rotoff
from rotoff.planning.options import Options
from rotoff.planning.request import Request
from rotoff.planning.step_courses import StepRunner
from rotoff.planning.tape_placed_planner import Found
from rotoff.planning.tape_placed_runner import PlacedRunner
from rotoff.profile.tape_groups import TapeGroups
from rotoff.runtime.links.pool import LinkPool

Solve = Callable[[rotoff.Chain], rotoff.Sequence]


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def least(updates: str, share: float = 0.0) -> Solve:
    """A plan of `solve` within a part of the way from the smallest limit to keeping everything."""

    def solve(chain: rotoff.Chain) -> rotoff.Sequence:
        low = rotoff.min_mem_limit(chain, "joint", updates)
        high = rotoff.simulate(chain, rotoff.keep_all(chain, updates), updates=updates).peak_bytes
        return rotoff.solve(chain, int(low + share * (high - low)), refine=False, updates=updates)

    return solve


def in_any_order(updates: str) -> Solve:
    """What a random walk makes of a plan, by steps that are legal: what moves, when, and what stays between steps."""

    def solve(chain: rotoff.Chain) -> rotoff.Sequence:
        plan = least(updates, 0.3)(chain)
        data = plan.to_dict() | {"resident": list(plan.resident)}
        walk, legal = mutants(data, len(chain.parameters), Random(0)), None
        for _ in range(150):
            step = walk.send(legal)
            try:
                rotoff.simulate(chain, rotoff.Sequence.from_dict(step), updates=updates)
                data, legal = step, True
            except rotoff.RotoffError:
                legal = False
        return rotoff.Sequence.from_dict(data)

    return solve


SOLVES = {
    "least": least,
    "more": lambda updates: least(updates, 0.4),
    "in any order": in_any_order,
}


class Given(PlacedRunner):
    """Follows sequences that a function makes of a chain."""

    def __init__(self, net: nn.Module, optimizers: list[Optimizer], solve: Solve, updates: str) -> None:
        super().__init__(StepRunner(net, Options(stages=12), LinkPool()), optimizers)
        self.request = Request(1, "joint", 50, {"updates": updates})
        self._solve = solve

    def choose(self, ways: Sequence[TapeGroups], request: Request) -> Found:
        return ways[0], self._solve(ways[0].chain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(partial(self.model, *args, **kwargs))


def step(run: Any, optimizers: list[Optimizer], batch: Any, n: int) -> torch.Tensor:
    torch.manual_seed(n)
    out = run(batch)  # which the caller holds during the backward
    loss = out.float().square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def trained(name: str, make: Any, solve: Solve | None, updates: str, steps: int = 6) -> tuple[list[Any], Any]:
    """What steps leave, the first of which is recorded if there is a plan; and the runner."""
    net, draw = drawn(name)
    batch = draw()
    optimizers = [make([p for p in net.parameters() if p.requires_grad])]
    run: Any = net
    if solve is not None:
        run = Given(net, optimizers, solve, updates)
    losses = [step(run, optimizers, tree_map(torch.clone, batch), n) for n in range(steps)]
    return [*losses, *result(net, optimizers), torch.get_rng_state()], run


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("name", [*MODELS, *ALL])
@pytest.mark.grid(every=20)
def test_bits_of_the_plain_model(name: str, solve: str, make: Any, updates: str) -> None:
    got, run = trained(name, make, SOLVES[solve](updates), updates)
    run.close()
    assert same(got, trained(name, make, None, updates)[0])
    assert [course.strayed for course in run] == [0]


# Not foretold yet: what a matrix exponential takes, which depends on its numbers, and PyTorch's own checkpoints.
SIZED = [name for name in MODELS if name not in ("parametrized", "checkpoints", "reentrant")]


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("name", SIZED)
@pytest.mark.grid(every=6)
def test_the_device_has_at_most_the_predicted_bytes(name: str, solve: str, updates: str) -> None:
    measured, expected = peaks(name, SOLVES[solve](updates), updates)
    assert measured <= expected


def peaks(name: str, solve: Solve, updates: str) -> tuple[int, int]:
    net, draw = drawn(name)
    batch = draw()
    optimizers = [adamw([p for p in net.parameters() if p.requires_grad])]
    run = Given(net, optimizers, solve, updates)
    for n in range(4):  # after the first by a plan, another one may be made
        step(run, optimizers, batch, n)

    def anew() -> None:
        """Whatever lies in memory of the process's own lies in new memory."""
        own_again(net, optimizers)
        for module in net.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.clone()

    def steps() -> None:
        for n in range(3):
            step(run, optimizers, batch, n)

    measured = peak_bytes(steps, before=anew) + batch.nbytes
    (course,) = run
    run.close()
    return measured, run.planned(course).figures(None).peak_bytes
