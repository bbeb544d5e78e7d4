"""Steps whose tensors are larger than those that were measured, though the input's sizes do not say so: that is said
once, and later ones keep the limit. What the model has in attributes nobody watches while it keeps everything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import Does, several
from planned_steps import Beside
from torch import nn
from torch.nn import functional as F

import rotoff

WIDTH = 32
SAID = "made other operations than the planned ones"


def run(net: Any, x: torch.Tensor, *more: Any) -> torch.Tensor:
    """Four blocks with skip connections on what `chosen` takes of the input."""
    x = net.chosen(net, x, *more)
    for block in net.blocks:
        x = x + block(x)
    return x.square().mean()


def blocks(chosen: Callable[..., torch.Tensor]) -> nn.Module:
    return Does(run, chosen=chosen, length=64, blocks=several(4, WIDTH, 4 * WIDTH))


def by_number(model: Any, x: torch.Tensor, length: int) -> torch.Tensor:
    return x[:, :length]


def by_data(model: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return x[:, : int(lengths.max())]


def by_mask(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask]


def padded(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[1] % 256))


ALL = torch.ones(4, 512, dtype=torch.bool)
KEPT, MOVED = 5_500_000, 5_000_000  # limits, above what the smaller step takes and below; the larger one takes 10 MB
GROWING: dict[str, tuple[Callable[..., torch.Tensor], int, Sequence[Any], Sequence[Any]]] = {
    "a number": (by_number, KEPT, [64], [512]),
    "a number, moved": (by_number, MOVED, [400], [512]),
    "a mask": (by_mask, KEPT, [ALL & (torch.arange(512) < 64)], [ALL]),
}


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.grid
def test_a_step_with_larger_tensors_is_said_and_the_next_ones_keep_the_limit(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, limit, small, large = GROWING[kind]
    x = torch.randn(4, 512, WIDTH)
    trained = Beside(blocks(chosen), limit)
    for _ in range(2):
        trained.step(x, *small)
    assert trained.planned.get_expected_memory() <= limit
    with caplog.at_level(logging.WARNING, "rotoff"):
        for _ in range(4):
            trained.step(x, *large)
    assert sum(SAID in one for one in caplog.messages) == 1
    trained.check(x, *large)
    trained.check(x, *small)


def test_steps_below_what_was_measured_alarm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The first one is smaller, so that the second one takes more; nothing is measured again."""
    x = torch.randn(4, 512, WIDTH)
    trained = Beside(blocks(by_data), 14_000_000)
    trained.planned.measure(x, torch.tensor([512])).compute_sequence(14_000_000, refine=False)
    with caplog.at_level(logging.INFO, "rotoff"):
        for length in (64, 512, 64, 512):
            trained.step(x, torch.tensor([length]))
        assert not any("measur" in one for one in caplog.messages)


def test_sizes_that_share_a_plan_alarm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    trained = Beside(blocks(padded), 1 << 30)
    trained.step(torch.randn(16, 160, WIDTH))
    with caplog.at_level(logging.INFO, "rotoff"):
        for length in (33, 48, 40, 65, 80, 129, 144, 33, 48):
            trained.step(torch.randn(16, length, WIDTH))
        assert not any("measur" in one for one in caplog.messages)


def test_the_models_own_code_runs_once_in_every_step() -> None:
    """Also in one that is recorded or measured since the one before took more."""
    found = {True: iter(range(100)), False: iter(range(100))}

    def counted(model: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, : int(lengths.max())] * (1 + next(found[model.length > 64]))

    x = torch.randn(4, 512, WIDTH)
    trained = Beside(blocks(counted), KEPT)
    trained.model.length = 65
    for length in (64, 64, 512, 64, 512, 512, 64):
        trained.step(x, torch.tensor([length]))
    assert next(found[True]) == next(found[False])


def test_larger_tensors_that_cannot_be_planned_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 512, WIDTH)
    trained = Beside(blocks(by_number), 2_000_000)
    with caplog.at_level(logging.WARNING, "rotoff"):
        for length in (64, 64, *[512] * 7, 64):
            trained.step(x, length)
    assert sum(SAID in one for one in caplog.messages) == 1
    assert sum("left the device at once; the limit is" in one for one in caplog.messages) == 1
    assert len(caplog.messages) == 2
    trained.check(x, 64)


# -- where values move


def picks(net: Any, x: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Puts the rows above a threshold through a wide layer, four times."""
    for n in range(4):
        h = net.inner[4 * n + 1](net.inner[4 * n](x))
        picked = x[:, 0] > least
        h = h.masked_scatter(picked[:, None], net.wide[n](h[picked]))
        x = x + net.inner[4 * n + 3](net.inner[4 * n + 2](h))
    return x.sum()


def picking() -> nn.Module:
    return Does(picks, inner=several(16, 8, 32), wide=several(4, 8, 64))


def test_values_that_data_made_a_little_larger_than_measured_still_leave_the_device() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    beside = Beside(picking(), sample=(x, torch.tensor(0.0))).within("offload")
    beside.step(x, torch.tensor(-0.1))
    assert beside.peak(x, torch.tensor(-0.1)) <= 1.15 * beside.limit
    beside.planned.close()


def test_values_that_data_made_larger_stay_on_the_device_if_the_host_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    beside = Beside(picking(), sample=(x, torch.tensor(0.0))).within("offload")
    beside.step(x, torch.tensor(0.0))

    def full(_self: object, nbytes: int) -> None:
        raise rotoff.ExecutionError(f"{nbytes} bytes are needed")

    monkeypatch.setattr("rotoff.runtime.links.host_file.HostFile.reserve", full)
    beside.step(x, torch.tensor(-0.1))
    beside.planned.close()
