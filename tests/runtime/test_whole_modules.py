"""Models whose modules run inside of other code: where parameters move, and the bytes of their steps. How they train
otherwise is in the table of test_changing_models.py (`whole_models`)."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import whole_models  # noqa: F401 - fills the table
from allocated import peak_bytes
from step_by_step import Row, fresh, same
from torch import nn
from trunks import TABLE

import rotoff

NAMES = ("a Function over a module:", "a mapped cell", "an ensemble")
ROWS = [row for row in TABLE if row.name.startswith(NAMES) and row.may_refuse is None]


def trained(run: nn.Module, net: Any, row: Row, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Losses, and what four steps leave."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    found: list[Any] = []
    for n in range(4):
        row.change(net, n)
        found.append(row.step(run, net, row.call(n), n).detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *net.parameters(), *net.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.grid(every=3)
def test_parameters_of_modules_within_other_code_may_move(row: Row, updates: str) -> None:
    probe = fresh(row)
    for n in range(4):
        row.change(probe, n)  # all that they come to be
    run = rotoff.Checkpointable(probe, cache_directory=None, stages=5).measure(*row.call(0)[0])
    options: dict[str, Any] = {"updates": updates, "refine": False}
    with pytest.raises(rotoff.InfeasibleError) as least:
        run.compute_sequence(device_limit=1, optimizer=torch.optim.SGD(probe.parameters(), 0.05, 0.9), **options)
    run.close()
    net = fresh(row)
    run, optimizer = rotoff.Checkpointable(net, cache_directory=None), torch.optim.SGD(net.parameters(), 0.05, 0.9)
    run.compute_sequence(device_limit=int(1.5 * least.value.min_mem_limit), optimizer=optimizer, **options)
    ours = trained(run, net, row, optimizer)
    assert run.chain.parameters and any(op.of for op in run.sequence)
    run.close()
    net = fresh(row)
    assert same(ours, trained(net, net, row, torch.optim.SGD(net.parameters(), 0.05, 0.9)))


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith(NAMES[0])], ids=lambda row: row.name)
def test_a_step_of_theirs_stays_within_its_prediction(row: Row) -> None:
    net, x = fresh(row), row.call(0)[0][0].repeat(16, 1)
    model = rotoff.Checkpointable(net, cache_directory=None).measure(x)
    model.compute_sequence(model.min_mem_limit())
    unit = torch.ones_like(model(x))
    model(x).backward(unit)  # gradients are the caller's
    assert peak_bytes(lambda: model(x).backward(unit)) <= model.get_expected_memory()
    model.close()
