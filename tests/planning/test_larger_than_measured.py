"""Steps that differ from the measured one, though the input's sizes do not say so: larger tensors are said once, and later
steps keep the limit; layers that are skipped by chance come to one plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import Does, Residual, several
from planned_steps import Beside
from torch import nn

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


# -- layers that a forward skips by chance


def run_some(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Skips each layer with probability `chance`, as wav2vec 2.0 does."""
    for layer in net.layers:
        if torch.rand([]) >= net.chance:
            x = layer(x)
    return net.head(x).mean(1)


def layer_drop(layers: int, chance: float) -> Any:
    parts = nn.ModuleList(Residual(64) for _ in range(layers))
    return Does(run_some, layers=parts, head=nn.Linear(64, 10), chance=chance)


def test_a_model_that_was_not_measured_comes_to_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, x = layer_drop(12, 0.3), torch.randn(8, 64, 64)
    limit = Beside(layer_drop(12, 0.3), sample=(x,)).within("joint", 1 / 3).limit
    beside = Beside(plain, limit)
    for _ in range(12):
        beside.step(x)
    caplog.clear()
    for _ in range(8):
        beside.check(x)
    assert not caplog.records


def test_a_followed_step_that_keeps_everything_frees_what_nothing_saves() -> None:
    torch.manual_seed(0)
    model, x = layer_drop(12, 0.0), torch.randn(8, 64, 64)
    model.layers[:9].requires_grad_(False)
    beside = Beside(model, sample=(x,)).within("joint", 1.0)
    beside.check(x)
    assert beside.planned.get_expected_memory() == beside.planned.keep_all_memory
    beside.planned.close()


def test_a_second_backward_holds_what_the_plan_charges() -> None:
    torch.manual_seed(0)
    plain, x = layer_drop(6, 0.3), torch.randn(8, 64, 64)
    plain.layers[:3].requires_grad_(False)
    beside = Beside(plain, sample=(x,), check=True, backward=twice).within("joint", 1.0)
    for _ in range(3):
        beside.step(x)
    beside.planned.close()


def twice(output: torch.Tensor, _: Any) -> None:
    loss = output.pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def one_of_two(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Goes one of two ways, as its caller says, in the middle of its own code."""
    h = net.first(x).relu()
    h = net.left(h).relu() if net.phase else net.right(h).tanh() + h
    return net.last(h).sin().mean(1)


def phases(share: float, x: torch.Tensor) -> Beside:
    torch.manual_seed(0)
    parts = {name: nn.Linear(64, 64) for name in ("first", "left", "right", "last")}
    return Beside(Does(one_of_two, phase=0, **parts), sample=(x,)).within("joint", share)


def in_phase(beside: Beside, phase: int) -> Beside:
    beside.plain.phase = beside.model.phase = phase
    return beside


def test_courses_that_take_turns_come_to_have_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, 64, 64)
    beside = phases(0.29, x)
    for step in range(10):
        in_phase(beside, step % 2).step(x)
    assert len(caplog.records) == 1, "one warning, for the first step on the other course"
    caplog.clear()
    for phase in (0, 1):
        in_phase(beside, phase).check(x)
    assert not caplog.records


def test_courses_whose_plan_does_not_fit_as_one_keep_their_own() -> None:
    x = torch.randn(8, 64, 64)
    beside = phases(0.0, x)
    for step in range(12):
        in_phase(beside, step % 2).step(x)
