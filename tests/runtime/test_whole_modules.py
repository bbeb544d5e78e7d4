"""Models whose modules run inside of other code: where parameters move, and the bytes of their steps. How they train
otherwise is in the table of test_changing_models.py (`whole_models`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import whole_models  # noqa: F401 - fills the table
from forced_plans import alike, place, twins
from models import same
from planned_steps import bits_and_bytes
from step_by_step import Row, fresh, seeded
from trunks import TABLE

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
    bits_and_bytes(fresh(row), lambda: row.call(0)[0][0].repeat(16, 1), ["joint"], (0.0,))
