"""Models that change between steps train to the bits of the plain model, or are refused in a sentence: a table, row by
row."""

from __future__ import annotations

from functools import partial
from typing import Any

import changing_models  # noqa: F401 - fills the table
import pytest
import torch
from forced_plans import alike, place, twins
from models import same
from odd_models import HELD
from planned_steps import bits_and_bytes
from step_by_step import MODES, Row, fresh, is_right, seeded, verdict
from trunks import TABLE
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


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


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
