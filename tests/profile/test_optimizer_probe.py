"""What an optimizer's update takes, found on small parameters."""

import random
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotoff.errors import OptionError
from rotoff.profile.allocations import logged, peak_of
from rotoff.profile.optimizer_probe import OptimizerProbe


@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.AdamW])
@pytest.mark.parametrize("shape", [(96, 96), (64, 1024), (192, 120), pytest.param((1024, 640), marks=pytest.mark.slow)])
def test_bytes_that_depend_on_the_shape_are_found_on_it(
    make: type[torch.optim.Optimizer], shape: tuple[int, ...]
) -> None:
    """Muon multiplies matrices: four times the parameter's bytes where it is square, two where it is long."""
    parameter = nn.Parameter(torch.randn(shape))
    optimizer, device = make([parameter], lr=1e-3), torch.device("cpu")
    found = OptimizerProbe([optimizer], device, None).update_bytes([parameter])
    parameter.grad = torch.randn(shape)
    optimizer.step()
    taken = peak_of(logged(optimizer.step, device)[1])
    assert taken <= found <= 1.02 * taken + 256


SEVERAL = {
    "Rprop at once": (partial(torch.optim.Rprop, foreach=True), [(64, 64)] * 4),  # beside all signs a mask of one
    "Adafactor": (torch.optim.Adafactor, [(512, 130), (512,)]),  # means of rows stay until the next matrix
    "Adafactor of a row": (torch.optim.Adafactor, [(1, 1, 640), (640,)]),  # with means of one element
    "Adafactor of convolutions": (torch.optim.Adafactor, [(64, 3, 7, 7), (512, 128, 1, 1), (64, 512, 3, 3)]),
    "AdamW": (torch.optim.AdamW, [(96, 96), (96,), (96, 96)]),
    "AdamW at once": (partial(torch.optim.AdamW, foreach=True), [(96, 96), (96,), (96, 96)]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_bytes_of_several_parameters_are_no_less_than_their_update_takes(name: str) -> None:
    make, shapes = SEVERAL[name]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer, device = make(parameters, lr=1e-3), torch.device("cpu")
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        found = OptimizerProbe([optimizer], device, None).update_bytes(parameters)
        taken = peak_of(logged(optimizer.step, device)[1])
    assert taken <= found <= 1.02 * taken + 256 * len(parameters)


class Own(torch.optim.Optimizer):
    """One of the user's; `make` returns the state of a parameter."""

    def __init__(self, parameters: Any, make: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.make = make
        self.steps = 0
        self.log: list[str] = []
        self.count, self.nested, self.recent = torch.zeros(()), {"of": defaultdict(int)}, deque[int]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                if not self.state[parameter]:
                    self.state[parameter].update(self.make(parameter))
                parameter.sub_(parameter.grad, alpha=0.01)


class Launched(torch.optim.Optimizer):
    """Its step takes 5 ms whatever it updates, and a nanosecond for each element."""

    now = 0.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)
            Launched.now += 1e-9 * parameter.numel()
        Launched.now += 5e-3


def test_the_seconds_of_an_update_are_those_of_its_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotoff.profile.optimizer_probe.time.perf_counter", lambda: Launched.now)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4000,), (50, 20))]
    probe = OptimizerProbe([Launched(parameters)], torch.device("cpu"), {})
    assert probe.update_time(parameters) == pytest.approx(5e-6, rel=1e-3)


STATES: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], int, int]] = {
    "in a list": (lambda p: {"moments": [torch.zeros_like(p), torch.zeros_like(p)]}, 0, 2 * 40 * 30 * 4),
    "flat": (lambda p: {"moment": torch.zeros(p.numel())}, 40 * 30 * 4, 0),
    "square": (lambda p: {f"of {n}": torch.eye(size) for n, size in enumerate(p.shape)}, 40 * 40 * 4 + 57 * 64, 0),
    "a count": (lambda p: {"count": torch.zeros(())}, 0, 4),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_any_form_are_found(name: str) -> None:
    make, placed, unplaced = STATES[name]
    parameter = nn.Parameter(torch.randn(40, 30))
    probe = OptimizerProbe([Own([parameter], make)], torch.device("cpu"), None)
    assert (probe.state_bytes(parameter), probe.unplaced_bytes([parameter])) == (placed, unplaced)


def test_a_state_that_needs_more_than_there_is_on_large_parameters_is_tried_on_the_parameters_own_shape() -> None:
    parameter = nn.Parameter(torch.randn(64))
    optimizer = Own([parameter], lambda p: {"preconditioner": torch.eye(len(p))})
    assert OptimizerProbe([optimizer], torch.device("cpu"), {}).update_bytes([parameter]) < 64 * 64 * 4 * 2 + 256


class Odd(Own):
    """Does something more in its step; a number that this returns changes the parameters."""

    def __init__(self, parameters: Any, more: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(parameters, lambda p: {})
        self.more = more
        self.param_groups[0].update(settings)
        vars(self).update(settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = self.more(self)
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(found if isinstance(found, float) else 0.0)


COUNTS = "Odd keeps a state that belongs to no parameter"  # each group's update would be a step
DRAWS = "Odd draws random numbers in its step.*give a mem_limit instead"
REFUSED: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "a state": (COUNTS, lambda of: of.state["of all"].update(steps=1 + len(of.state["of all"])), {}),
    "an attribute": (COUNTS, lambda of: setattr(of, "steps", of.steps + 1), {}),
    "a list": (COUNTS, lambda of: of.log.append("a step"), {}),
    "a tensor": (COUNTS, lambda of: of.count.add_(1), {}),
    "a nested one": (COUNTS, lambda of: of.nested["of"].update(steps=1 + of.nested["of"]["steps"]), {}),
    "a deque": (COUNTS, lambda of: of.recent.append(1), {}),
    "torch": (DRAWS, lambda _: torch.rand(()).item(), {}),
    "torch, in bits": (DRAWS, lambda _: float(torch.randint(2, ())), {}),
    "python": (DRAWS, lambda _: random.random(), {}),
    "numpy": (DRAWS, lambda _: float(np.random.rand()), {}),
    "a generator": (
        DRAWS, lambda of: torch.rand((), generator=of.generator).item(), {"generator": torch.Generator().manual_seed(3)}
    ),
    "a generator of numpy": (DRAWS, lambda of: float(of.of.random()), {"of": np.random.default_rng(3)}),
    "a generator of python": (DRAWS, lambda of: of.of.random(), {"of": random.Random(3)}),
    "draws that change nothing": (DRAWS, lambda _: 0 * torch.rand(()).item(), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_counts_its_own_steps_or_draws_is_refused_for_that_and_unchanged(name: str) -> None:
    sentence, more, settings = REFUSED[name]
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = Odd([parameter], more, **settings)
    probe = OptimizerProbe([optimizer], torch.device("cpu"), None)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    with pytest.raises(OptionError, match=sentence):
        probe.state_bytes(parameter)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]
    assert (optimizer.steps, optimizer.log, dict(optimizer.state)) == (0, [], {})
    assert (optimizer.count.item(), optimizer.nested, len(optimizer.recent)) == (0, {"of": {}}, 0)


def test_an_optimizer_that_holds_a_generator_and_does_not_draw_is_not_refused() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = Odd([parameter], lambda _: None, generator=torch.Generator(), of=random.Random(1))
    assert OptimizerProbe([optimizer], torch.device("cpu"), None).state_bytes(parameter) == 0
