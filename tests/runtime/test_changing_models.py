"""Models that change between steps train to the bits of the plain model, or are refused in a sentence: a table, row by
row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
import torch
from changing_models import again_backward
from forced_plans import alike, place, twins
from hypothesis import Phase, assume, given, note, settings
from hypothesis import strategies as st
from models import same
from odd_models import HELD
from planned_steps import bits_and_bytes
from step_by_step import MODES, Row, fresh, is_right, nothing, one_step, seeded, verdict
from trunks import ADDED, TABLE, Added, Long, at, batch
from whole_models import UNSEEN

ROWS = [*TABLE, *UNSEEN]
CASES = [  # every third row in one of the modes; slowly, all in each
    pytest.param(
        row, mode, id=f"{row.name}, {mode}", marks=[pytest.mark.slow] if n % 3 or mode != MODES[n // 3 % 3] else []
    )
    for n, row in enumerate(ROWS)
    for mode in MODES
]


@pytest.mark.parametrize(("row", "mode"), CASES)
def test_what_changes_between_steps_is_followed_or_refused(row: Row, mode: str) -> None:
    said = verdict(row, mode)
    assert is_right(row, said), said


# -- modules that run inside of other code, and what is held past autograd's saved tensors: parameters that move, and bytes


NAMES = ("a Function over a module:", "a mapped cell", "an ensemble")
ROWS = [row for row in TABLE if row.name.startswith(NAMES) and row.may_refuse is None]


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.grid(every=3)
def test_parameters_of_modules_within_other_code_may_move(row: Row, updates: str) -> None:
    def momentum(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, 0.05, 0.9)]

    found, pairs = [], twins(fresh(row), *row.call(0)[0], updates=updates, share=0.2, make=momentum, plan=place)
    for net, run, (optimizer,) in pairs:
        seeded()
        losses = []
        for n in range(4):
            losses.append(row.step(run, net, row.call(n), n).detach())
            optimizer.step()
            optimizer.zero_grad()
        found.append([*losses, *net.buffers(), torch.get_rng_state()])
    assert any(op.of for op in pairs[1][1].sequence)
    assert alike(pairs) and same(*found)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith(NAMES[0])], ids=lambda row: row.name)
def test_a_step_of_theirs_stays_within_its_prediction(row: Row) -> None:
    bits_and_bytes(fresh(row), lambda: (row.call(0)[0][0].repeat(16, 1),), ["joint"], (0.0,))


@pytest.mark.parametrize("modes", [("remat", "offload"), ("joint",)], ids=["without forms", "with forms"])
@pytest.mark.parametrize("row", [row for row in TABLE if row.name.startswith(HELD)], ids=lambda row: row.name)
@pytest.mark.grid(every=3)
def test_bytes_that_are_held_elsewhere_are_charged(row: Row, modes: tuple[str, ...]) -> None:
    make = partial(fresh, row)
    options = {"fresh": make, "stages": 6, "forms": modes == ("joint",)}
    bits_and_bytes(make(), lambda: (row.call(0)[0][0].repeat(4, 1),), modes, (0.0, 0.5, 0.8, 1.0), **options)


# -- random mixes of what the rows do, with random changes between their steps


INFEASIBLE = (
    "refused: the training step needs at least"  # a change may ask for more than the limit that was given before
)


class Mixed(Long):
    """Runs its blocks in an order of its own."""

    acts: list[Added]

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(self.many))

    def along(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.acts[n % len(self.acts)].act(self, x, n % 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, k in enumerate(self.order):
            x = self.along(self.blocks[k](x), n)
        return self.head(x)


def turned(net: Any, n: int) -> None:
    net.order = [*net.order[1:], net.order[0]]


def part_frozen(net: Any, n: int) -> None:
    for block in net.blocks[::2]:
        block.requires_grad_(n % 2 == 0)


def hooked(net: Any, n: int) -> None:
    if n % 2:
        net.handle = net.blocks[3].norm.register_forward_hook(lambda module, args, result: result * 0.5)
    elif n:
        net.handle.remove()


CHANGES: tuple[Callable[[Any, int], object], ...] = (
    nothing,
    turned,
    part_frozen,
    hooked,
    at(2, lambda net: net.order.pop()),
    at(2, lambda net: net.order.append(0)),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    acts = draw(st.lists(st.sampled_from(ADDED), min_size=2, max_size=4, unique_by=lambda act: act.name))
    other = draw(st.sampled_from(CHANGES))
    has = {name: make for act in acts for name, make in act.has.items()}

    def change(net: Any, n: int) -> None:
        for one in (*(act.change for act in acts), other):
            one(net, n)

    def again(net: Any) -> None:
        for act in acts:
            act.again(net)

    step, room = draw(st.sampled_from((one_step, again_backward))), draw(st.sampled_from((0.2, 0.4, 0.6)))
    name = f"{[act.name for act in acts]}, {CHANGES.index(other)}, {step.__name__}"
    make = type("Mix", (Mixed,), {"acts": acts}, **has)
    return Row(name, make, batch, change, step=step, room=room, again=again, steps=4)


# Nothing is shrunk: what is drawn is small, and each attempt takes a measurement.
@settings(max_examples=settings().max_examples // 2, phases=(Phase.explicit, Phase.generate))
@given(row=rows(), mode=st.sampled_from(MODES))
def test_random_models_that_change_train_as_the_plain_model_does(row: Row, mode: str) -> None:
    said = verdict(row, mode)
    note(f"{row.name}, {mode}, room {row.room}")
    assume(not said.startswith(("no plan", INFEASIBLE)))
    assert said == "equal"
