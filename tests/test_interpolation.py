"""Times at a new batch size from two that were measured: exact bytes, safe times, and said."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
import torch
from models import Residual, same, train
from torch import nn

import rotoff
from rotoff.planning.specialization import signature
from rotoff.profile.profile import Profile
from rotoff.profile.timing.interpolation import MeasuredTimes
from rotoff.tensors.stage import Behaviour

WIDTH = 32


class Written(nn.Module):
    """A forward of its own, so that its stages are found by recording it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * scale
        return x.square()


def stacked() -> nn.Module:
    return nn.Sequential(*[Residual(WIDTH) for _ in range(4)])


def step(model: nn.Module, batch: int) -> None:
    scale = (torch.ones(batch, 1),) if "Written" in repr(model) else ()
    model(torch.randn(batch, WIDTH), *scale).sum().backward()


def planned(model: nn.Module, sizes: tuple[int, ...], **options: object) -> rotoff.Checkpointable:
    wrapped = rotoff.Checkpointable(model, **options).compute_sequence("2 MiB", mode="remat")
    for batch in sizes:
        step(wrapped, batch)
    return wrapped


@pytest.mark.parametrize("made", [stacked, Written])
def test_bytes_are_those_measured_and_times_are_between(made: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model = made()
    sizes = (64, 128)
    wrapped = planned(model, sizes)
    low, high = (course.profile.chain for course in wrapped._courses)
    with caplog.at_level(logging.INFO, "rotoff"):
        step(wrapped, 96)
    assert "rotoff: times interpolated between batch 64 and 128" in caplog.text
    found = wrapped.profile
    assert found.chain.meta["times"] == "interpolated between those measured at batch 64 and 128"
    fresh = planned(model, (96,)).profile
    assert fresh.chain.meta["times"] == "measured"
    assert [b.saved for b in found.behaviours] == [b.saved for b in fresh.behaviours]
    for name in (f.name for f in fields(rotoff.Stage) if f.name.endswith("_bytes")):
        assert [getattr(s, name) for s in found.chain.stages] == [getattr(s, name) for s in fresh.chain.stages], name
    for name in (f.name for f in fields(Profile) if f.name.endswith("_bytes")):
        assert getattr(found, name) == getattr(fresh, name), name
    for name in ("input_bytes", "input_grad_bytes"):
        assert getattr(found.chain, name) == getattr(fresh.chain, name)
    for a, s, b in zip(low.stages, found.chain.stages, high.stages, strict=True):
        assert s.forward_time == pytest.approx((a.forward_time + b.forward_time) / 2)
        assert s.backward_time == pytest.approx((a.backward_time + b.backward_time) / 2)
        assert len(s.forms) <= min(len(a.forms), len(b.forms))
    wrapped.close()


def test_forms_that_both_sizes_have_are_taken_over_with_bytes_of_their_own() -> None:
    model = stacked()
    wrapped = planned(model, (64, 128, 96), forms=["addmm"])
    sizes = {c.profile.chain.stages[0].output_bytes: c.profile for c in wrapped._courses}
    low, found, high = (sizes[b * WIDTH * 4] for b in (64, 96, 128))
    kept = [
        {r.kept: f for r, f in zip(p.behaviours[0].forms, p.chain.stages[0].forms, strict=True)} for p in (low, found, high)
    ]
    assert kept[1]
    assert set(kept[1]) <= set(kept[0]) & set(kept[2])
    for slots, form in kept[1].items():
        assert 2 * form.saved_bytes == kept[0][slots].saved_bytes + kept[2][slots].saved_bytes


def test_nothing_is_timed_and_it_trains_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, plain = stacked(), stacked()
    plain.load_state_dict(model.state_dict())
    wrapped = planned(model, (64, 128))
    wrapped.zero_grad()
    monkeypatch.setattr("rotoff.profile.stage_meter.Meter._times", None)

    def batch() -> torch.Tensor:
        return torch.linspace(-1, 1, 96 * WIDTH).reshape(96, WIDTH)

    wrapped.compute_sequence("1 GiB")(batch()).sum().backward()
    wrapped.zero_grad()
    wrapped.compute_sequence(wrapped.keep_all_memory * 6 // 10, mode="remat")
    assert same(train(wrapped, batch), train(plain, batch))
    assert "interpolated" in wrapped.chain.meta["times"]
    assert any(str(op).startswith("F_ck") for op in wrapped.sequence)


@pytest.mark.parametrize("sizes", [(64,), (16, 128)], ids=["one", "far apart"])
def test_otherwise_it_is_measured(sizes: tuple[int, ...]) -> None:
    assert planned(stacked(), (*sizes, 96)).chain.meta["times"] == "measured"


def test_it_can_be_switched_off_and_measure_measures() -> None:
    assert planned(stacked(), (64, 128, 96), interpolate=False).chain.meta["times"] == "measured"
    wrapped = planned(stacked(), (64, 128))
    assert wrapped.measure(torch.randn(96, WIDTH)).chain.meta["times"] == "measured"


def profile_of(seconds: float) -> Profile:
    chain = rotoff.Chain((rotoff.Stage(name="a", forward_time=seconds, backward_time=2 * seconds),), 1.0, 1.0)
    behaviour = Behaviour(())
    return Profile(torch.device("cpu"), chain, (), (), (behaviour,), 0, 0)


def shapes(batch: int, length: int = 8) -> tuple[object, ...]:
    return (((batch, length), "torch.int64"), "True", ((batch, length, length), "torch.bool"))


def forward_time(new: tuple[object, ...], *measured: tuple[int, int, float]) -> float | None:
    times = MeasuredTimes()
    for batch, length, seconds in measured:
        times.add(shapes(batch, length), "here", "a", profile_of(seconds))
    found = times.find(new, "here", "a")
    assert times.find(new, "elsewhere", "a") is times.find(new, "here", "b") is None
    return None if found is None else found.times.stages[0].forward_time


def test_which_sizes_are_near_enough() -> None:
    pair = (16, 8, 1.0), (32, 8, 3.0)
    assert forward_time(shapes(24), *pair) == 2.0
    assert forward_time(shapes(48), *pair) == 5.0  # 1.5 times the larger
    assert forward_time(shapes(49), *pair) is None
    assert forward_time(shapes(11), *pair) == pytest.approx(0.375)
    assert forward_time(shapes(10), *pair) is None
    assert forward_time(shapes(24, 16), *pair) is None  # two sizes differ
    assert forward_time(shapes(24), (16, 8, 1.0), (32, 16, 3.0)) is None
    assert forward_time(shapes(35), (31, 8, 1.0), (32, 8, 3.0)) is None  # further than they are from each other
    assert forward_time(shapes(20), (16, 8, 1.0), (80, 8, 3.0)) is None
    assert forward_time(shapes(16, 12), (16, 8, 1.0), (16, 16, 3.0)) == 2.0  # a mask has the length twice
    assert forward_time(shapes(24), *pair, (28, 8, 7.0)) == pytest.approx(1 + 6 * 8 / 12)
    assert forward_time(shapes(12), (16, 8, 1.0), (32, 8, 9.0)) == 0.0  # never less than nothing


def test_another_constant_type_or_number_of_inputs_is_another_model() -> None:
    times = MeasuredTimes()
    for batch in (16, 32):
        times.add(shapes(batch), "here", "a", profile_of(1.0))
    first, flag, mask = shapes(24)
    assert times.find((first, flag, mask), "here", "a") is not None
    assert times.find((first, "False", mask), "here", "a") is None
    assert times.find(((first[0], "torch.int32"), flag, mask), "here", "a") is None
    assert times.find((first, flag), "here", "a") is None


def test_between_sizes_that_lie_alike_in_memory() -> None:
    def rows(batch: int) -> torch.Tensor:
        return torch.empty(batch, 9, 8)

    layouts = [
        lambda batch: rows(batch).transpose(1, 2),
        lambda batch: rows(batch)[:, :, :7],
        lambda batch: rows(batch)[:, ::2],
        lambda batch: rows(batch)[:, :1].expand(-1, 9, -1),
        rows,
    ]
    for n, made in enumerate(layouts):
        for other in layouts:
            times = MeasuredTimes()
            for batch in (16, 32):
                times.add(signature(made(batch), nn.Linear(1, 1))[0], "here", "a", profile_of(1.0))
            assert (times.find(signature(other(24), nn.Linear(1, 1))[0], "here", "a") is not None) == (other is made), n
