"""Inputs of other sizes: what is known of them from those measured, that it is enough, and what it costs."""

from __future__ import annotations

import copy
import logging
import math
import random
import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocated import peak_bytes
from models import Attention, Residual
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import rotoff
from rotoff.capture.course import expected
from rotoff.planning import planner
from rotoff.planning.sizes import MeasuredSizes, Sizes, covering, covers, powers_seen, rounded, split
from rotoff.planning.specializations import Specializations
from rotoff.profile.between_sizes import NotAlike, Share, between
from rotoff.profile.timing import timing_cache
from rotoff.runtime.execution_plan import compile_sequence

WIDTH = 32


class Written(nn.Module):
    """A forward of its own, so that its stages are found by recording it."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * scale
        return x.square()


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.last = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.norm(self.first(x)))
        low = F.silu(self.down(F.max_pool2d(skip, 2)))
        return self.last(F.silu(self.up(torch.cat((F.interpolate(low, scale_factor=2), skip), 1))))


class Masked(nn.Module):
    """Asks for its mask's type before it uses the positions, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(WIDTH, 4) for _ in range(4))
        self.places = nn.Parameter(torch.randn(512, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.places[: x.shape[1]].to(x.device)
        if mask.to(torch.bool).all():
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return x


def rows(batch: int) -> tuple[Any, ...]:
    return (torch.randn(batch, WIDTH),)


def words(length: int) -> tuple[Any, ...]:
    return (torch.randn(3, length, WIDTH),)


def tokens(length: int) -> tuple[Any, ...]:
    return (torch.randint(0, 50, (8, length)),)


def masked(length: int) -> tuple[Any, ...]:
    return torch.randn(3, length, WIDTH), torch.ones(3, length)


def crops(side: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, side, side + 32),)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "sequential": (lambda: nn.Sequential(*(Residual(WIDTH) for _ in range(5))), rows),
    "recorded": (lambda: Written(*(Residual(WIDTH) for _ in range(5))), rows),
    "attention": (lambda: Written(*(Attention(WIDTH, 4) for _ in range(4))), words),
    "masked": (Masked, masked),
    "convolutions": (Unet, crops),
    "tokens": (lambda: nn.Sequential(nn.Embedding(50, WIDTH), *(Attention(WIDTH, 4) for _ in range(4))), tokens),
}


@pytest.fixture
def measurings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One more for each time that something is measured."""
    seen: list[int] = []
    measure = Specializations.measure

    def counted(self: Specializations, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return measure(self, *args, **kwargs)

    monkeypatch.setattr(Specializations, "measure", counted)
    return seen


def planned(kind: str, share: float, largest: int, **options: Any) -> tuple[rotoff.Checkpointable, nn.Module]:
    """A model within `share` of the bytes of its largest input, and the plain one."""
    torch.manual_seed(0)
    model = KINDS[kind][0]()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    probe = rotoff.Checkpointable(copy.deepcopy(model)).measure(*KINDS[kind][1](largest))
    least = probe.min_mem_limit(options.get("mode", "joint"))
    limit = int(least + share * (probe.keep_all_memory - least))
    probe.close()
    check = options.pop("check", False)
    return rotoff.Checkpointable(model, check=check).compute_sequence(limit, **{"refine": False, **options}), plain


def train(model: nn.Module, batch: tuple[Any, ...]) -> None:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=False)
    model(*batch).sum().backward()


def step(model: nn.Module, batch: tuple[Any, ...]) -> list[torch.Tensor]:
    train(model, batch)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("mode", ["joint", "remat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.grid(every=8)
def test_sizes_between_two_train_bit_for_bit_within_the_limit(
    kind: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, plain = planned(kind, 0.4, 192, mode=mode)
    make = KINDS[kind][1]
    limit = wrapped.mem_limit
    with caplog.at_level(logging.WARNING, "rotoff"):
        for size in (192, 64, 96, 160, 104, 80, 176, 160, 68):
            batch = make(size)
            for ours, theirs in zip(step(wrapped, batch), step(plain, batch), strict=True):
                assert torch.equal(ours, theirs), size
            told = wrapped.get_expected_memory()
            peak = peak_bytes(lambda batch=batch: train(wrapped, batch))
            step(plain, batch)  # so that running statistics stay alike
            assert peak <= told <= limit, size
    assert "another course" not in caplog.text
    wrapped.close()


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("sequential", (32, 0, 1, 3, 0, 5)),
        ("recorded", (24, 0, 5, 0, 1)),
        ("attention", (16, 0, 1, 8)),
    ],
)
def test_an_empty_input_is_trained_and_tells_nothing_of_others(kind: str, sizes: tuple[int, ...], mode: str) -> None:
    model, plain = planned(kind, 0.0, max(sizes), mode=mode)
    for size in sizes:
        batch = KINDS[kind][1](size)
        assert all(map(torch.equal, step(model, batch), step(plain, batch))), size
    model.close()


@pytest.mark.parametrize("mode", ["joint", "remat"])
@pytest.mark.parametrize("sizes", [(32, 5, 48), (32, 5, 33)])
def test_a_size_told_by_one_other_holds_no_more_than_is_charged(sizes: tuple[int, ...], mode: str) -> None:
    """The skip connections that stay on the device, too."""
    model, plain = planned("recorded", 0.1, max(sizes), mode=mode, check=True)
    for size in sizes:
        batch = rows(size)
        assert all(map(torch.equal, step(model, batch), step(plain, batch))), size
    model.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.grid(every=6)
def test_a_step_between_two_sizes_takes_no_more_than_is_charged(kind: str) -> None:
    make = KINDS[kind][1]
    model = KINDS[kind][0]()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def measured(size: int) -> Any:
        return rotoff.Checkpointable(model).measure(*make(size)).profile

    low, high = measured(64), measured(192)
    for size in (96, 128, 160):
        part = (size - 64) / 128
        own, taken = measured(size), between([high, low], [Share(part, part), Share(1 - part, 1 - part)])
        assert [b.saved for b in own.behaviours] == [b.saved for b in taken.behaviours]
        for mine, theirs in zip(own.chain.stages, taken.chain.stages, strict=True):
            for name in (
                f.name for f in fields(rotoff.Stage) if f.name in ("output_bytes", "saved_bytes", "grad_bytes")
            ):
                assert getattr(mine, name) <= getattr(theirs, name) <= 1.6 * getattr(mine, name) + 64
        assert own.unmanaged_bytes <= taken.unmanaged_bytes


@pytest.mark.parametrize("kind", ["recorded", "sequential", "attention"])
@pytest.mark.grid
def test_smaller_forms_are_redone_at_sizes_that_were_not_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, plain = planned(kind, 0.5, 192)
    make = KINDS[kind][1]
    wrapped.measure(*make(192))  # all forms, also those that this limit does not need
    wholly: list[int] = []
    make_all = "rotoff.runtime.stage_run.StageRun._make_all"
    monkeypatch.setattr(
        make_all, lambda self, given: wholly.append(self.i) or self.again(given, True, None, alone=False)
    )
    for size in (192, 64, 160, 150):
        step(wrapped, make(size))
    course = wrapped._specializations.latest
    assert course is not None
    assert not any(recipe.sized for one in course.profile.behaviours for recipe in one.forms)
    stages = course.profile.chain.stages
    for form in (1, 2):
        ops = [
            f"F_sel {i} {min(form, len(s.forms))}" if s.forms else f"F_all {i}" for i, s in enumerate(stages, start=1)
        ]
        ops += [f"B {i}" for i in range(len(stages), 0, -1)]
        course.plan = compile_sequence(
            course.profile.chain, rotoff.Sequence(tuple(map(rotoff.parse, ops)), "remat", 1 << 40)
        )
        for size in (150, 160, 148):
            batch = make(size)
            assert all(map(torch.equal, step(wrapped, batch), step(plain, batch)))
    assert sum("F_sel" in op for op in ops) > 1
    assert not wholly


def test_values_beside_the_tensors_are_no_part_of_what_is_measured(measurings: list[int]) -> None:
    wrapped, plain = planned("recorded", 0.5, 96)
    measurings.clear()
    for scale in (1.0, 0.9, 0.8, 0.7):
        batch = (*rows(96), scale)
        assert all(map(torch.equal, step(wrapped, batch), step(plain, batch)))
    assert len(measurings) == 1


def test_the_third_size_that_is_measured_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, _ = planned("recorded", 1.0, 512)
    with caplog.at_level(logging.WARNING, "rotoff"):
        for size in (16, 40, 500, 200):
            step(wrapped, rows(size))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "the input's sizes vary (dimension 0 of x: 16, 40, 500)" in said[0]


class Table(nn.Module):
    """Multiplies by a table that it makes anew when a longer input comes."""

    table = torch.empty(0, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.table):
            self.table = (torch.arange(x.shape[1])[:, None] * torch.arange(1, 1 + WIDTH) / WIDTH).cos()
        return x * self.table[: x.shape[1]]


def test_a_table_that_only_a_longer_input_makes_anew() -> None:
    """Without the calls that make it, the next ones have the names of others that make it."""
    torch.manual_seed(0)
    plain = Written(Residual(WIDTH), Table(), Residual(WIDTH), nn.Linear(WIDTH, 8))
    probe = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None).measure(torch.randn(6, 96, WIDTH))
    least, most = probe.min_mem_limit("joint"), probe.keep_all_memory
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain), cache_directory=None)
    wrapped.compute_sequence(least + (most - least) // 4, refine=False)
    for n, (batch, length) in enumerate([(1, 16), (3, 70), (6, 70), (6, 70), (2, 40)]):
        x = torch.randn(batch, length, WIDTH)
        assert all(map(torch.equal, step(wrapped, (x,)), step(plain, (x,)))), n


def test_it_can_be_switched_off(measurings: list[int]) -> None:
    model = rotoff.Checkpointable(KINDS["recorded"][0](), interpolate=False).compute_sequence("1 GiB")
    for size in (192, 64, 96, 128):
        step(model, rows(size))
    assert len(measurings) == 4


def test_a_larger_size_that_may_not_fit_is_measured(measurings: list[int]) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        wrapped, _ = planned("attention", 0.05, 192)
        for size in (160, 80):
            step(wrapped, words(size))
        measurings.clear()
        step(wrapped, words(192))  # some bytes grow as the square, and if all did, they would exceed the limit
    assert measurings == [1]
    assert wrapped.chain.meta["times"] == "interpolated between those measured at other sizes"


@pytest.mark.parametrize(
    ("kind", "share"), [("recorded", 0.05), pytest.param("convolutions", 0.2, marks=pytest.mark.slow)]
)
def test_a_larger_size_keeps_the_limit(kind: str, share: float) -> None:
    wrapped, plain = planned(kind, share, 192)
    limit = wrapped.mem_limit
    for size in (80, 176, 192, 184):
        batch = KINDS[kind][1](size)
        assert all(map(torch.equal, step(wrapped, batch), step(plain, batch)))
        assert peak_bytes(lambda batch=batch: train(wrapped, batch)) <= wrapped.get_expected_memory() <= limit
        step(plain, batch)  # so that running statistics stay alike


def test_a_new_size_takes_over_which_calls_a_measured_one_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, plain = planned("recorded", 0.05, 192)
    for size in (192, 96):
        step(wrapped, rows(size))
    found: list[int] = []
    monkeypatch.setattr("rotoff.planning.specialization.expected", lambda *args: found.append(1) or expected(*args))
    for size in (176, 160, 144):
        batch = rows(size)
        assert all(map(torch.equal, step(wrapped, batch), step(plain, batch)))
        assert not wrapped._specializations.latest.plan.keeps_all
    assert not found


def test_a_plan_of_another_size_serves_until_steps_have_lost_what_a_search_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapped, plain = planned("recorded", 0.2, 192, mode="remat", refine=0.1)
    for size in (192, 96):
        step(wrapped, rows(size))
    searches: list[int] = []
    search = planner._best_within
    monkeypatch.setattr(planner, "_best_within", lambda *args: searches.append(1) or search(*args))
    sizes = wrapped._specializations._sizes
    sizes._searching = math.inf
    for _ in range(4):
        batch = rows(176)
        assert all(map(torch.equal, step(wrapped, batch), step(plain, batch)))
    course = wrapped._specializations.latest
    assert course is not None and course.borrowed and not searches
    slow = course.plan.trace.makespan
    sizes._searching = course.lost / 8
    step(wrapped, rows(176))
    assert searches and not course.borrowed
    assert course.plan.trace.makespan <= slow
    assert sizes._searching > 0


def test_a_size_at_which_everything_is_kept_is_not_measured_for_what_others_have_lost(measurings: list[int]) -> None:
    wrapped, _ = planned("recorded", 0.5, 192)
    for size in (192, 64, 20):
        step(wrapped, rows(size))
    course = wrapped._specializations.latest
    assert course.plan.keeps_all and course.loose > 1.2
    rounding = (1 + 1e-15) * course.profile.chain.compute_time
    course.plan = replace(course.plan, trace=replace(course.plan.trace, makespan=rounding))
    [measured] = wrapped._specializations._sizes._measured.values()
    measured.owed = math.inf
    measurings.clear()
    step(wrapped, rows(20))
    assert not measurings


def test_what_was_measured_serves_no_larger_size_that_rounds_to_the_same() -> None:
    wrapped, _ = planned("attention", 0.6, 160)
    for size in (150, 60, 147, 157, 160):
        batch = words(size)
        step(wrapped, batch)
        told = wrapped.get_expected_memory()
        assert peak_bytes(lambda batch=batch: train(wrapped, batch)) <= told, size


def test_plans_that_are_known_are_listed() -> None:
    wrapped, _ = planned("recorded", 0.2, 192, mode="remat")
    for size in (192, 64, 128):
        step(wrapped, rows(size))
    table = {one.shapes[0][0]: one for one in wrapped.plans()}
    assert table.keys() == {192, 64, 128}
    assert all(one.memory <= wrapped.mem_limit for one in table.values())
    assert table[192].makespan > 0 < table[192].overhead
    assert (table[64].makespan, table[64].overhead) == (None, None)  # of which everything is kept


def test_up_to_a_size_all_that_are_smaller_are_known() -> None:
    wrapped, plain = planned("tokens", 0.4, 96)
    limit = wrapped.mem_limit
    wrapped.compute_sequence(limit, up_to=KINDS["tokens"][1](96))
    for length, batch in ((96, 8), (50, 8), (40, 5), (96, 3), (4, 8), (96, 8)):
        given = (torch.randint(0, 50, (batch, length)),)
        assert all(map(torch.equal, step(wrapped, given), step(plain, given)))
        assert wrapped.get_expected_memory() <= limit


def test_up_to_a_size_that_does_not_fit_says_which_do() -> None:
    wrapped, _ = planned("tokens", 0.0, 96)
    limit = 3 * wrapped.mem_limit // 4
    with pytest.raises(rotoff.InfeasibleError, match=r"on the input of up_to, \[\[8, 96\]\], needs at least") as caught:
        wrapped.compute_sequence(limit, up_to=KINDS["tokens"][1](96))
    assert caught.value.min_mem_limit > limit
    batch, length = map(
        int, re.search(r"inputs of \[\[(\d+), 96\]\] and \[\[8, (\d+)\]\] fit", str(caught.value)).groups()
    )
    assert 4 <= batch < 8
    assert 48 <= length < 96
    fresh = rotoff.Checkpointable(KINDS["tokens"][0]()).compute_sequence(limit)
    for given in ((8, length), (batch, 96)):
        step(fresh, (torch.randint(0, 50, given),))
        assert fresh.get_expected_memory() <= limit
    wrapped.compute_sequence(caught.value.min_mem_limit, up_to=KINDS["tokens"][1](96))


@pytest.mark.parametrize("shape", [(4, 0, WIDTH), (0, 8, WIDTH)])
def test_up_to_an_empty_input_that_does_not_fit_names_no_others(shape: tuple[int, ...]) -> None:
    model = rotoff.Checkpointable(KINDS["recorded"][0]())
    with pytest.raises(rotoff.InfeasibleError) as caught:
        model.compute_sequence(100, up_to=torch.randn(shape))
    assert "half" not in str(caught.value)
    model.compute_sequence(caught.value.min_mem_limit, up_to=torch.randn(shape))


def test_an_input_larger_than_announced_is_said(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, _ = planned("tokens", 1.0, 160)
    wrapped.compute_sequence("1 GiB", up_to=KINDS["tokens"][1](24))
    with caplog.at_level(logging.WARNING, "rotoff"):
        step(wrapped, KINDS["tokens"][1](160))
    assert "the input [[8, 160]] is larger than up_to" in caplog.text


def test_up_to_a_size_modules_whose_bytes_depend_on_data_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count = int((x.sum(1) > 0).sum())
            return torch.cat((x[:count].tanh(), x[count:]))

    model = rotoff.Checkpointable(nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH)))
    with caplog.at_level(logging.WARNING, "rotoff"):
        model.compute_sequence("1 GiB", up_to=rows(64))
    assert "bytes of 0..1 depend on the data; plans for smaller inputs do not include them" in caplog.text


@pytest.mark.parametrize(("kind", "sizes"), [("recorded", (192, 64, 160, 96)), ("attention", (192, 128, 160, 96))])
def test_a_new_process_measures_no_size_that_the_cache_knows(
    kind: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one whose times are those of another size."""
    monkeypatch.setattr(timing_cache, "TOLERANCE", math.inf)  # times hold, however busy the machine is
    torch.manual_seed(0)
    make, batch = KINDS[kind]
    model = make()
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(*batch(sizes[0]))
    limit = int(0.6 * probe.keep_all_memory)

    def train_all() -> list[int]:
        wrapped = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=tmp_path)
        wrapped.compute_sequence(limit, refine=False)
        told = []
        for size in sizes:
            step(wrapped, batch(size))
            told.append(wrapped.get_expected_memory())
        wrapped.close()
        return told

    first = train_all()
    monkeypatch.setattr("rotoff.profile.stage_meter.Meter.stage", None)  # nothing is measured
    assert train_all() == first


# -- where sizes lie


def test_sizes_are_rounded_up_to_eight_steps_of_a_power_of_two_and_to_multiples_of_sixteen() -> None:
    def one(size: int, *more: int) -> tuple[int, ...]:
        return rounded(((size, *more),))[0]

    assert [one(n)[0] for n in (1, 7, 15, 16, 17, 33, 100, 129, 511, 513)] == [1, 7, 15, 16, 18, 48, 112, 144, 512, 576]
    for a, b in pairwise(range(1, 2000)):
        assert a <= one(a)[0] <= one(b)[0] <= max(b + 15, 1.125 * b)
    assert one(2, 3, 70, 40) == (2, 3, 96, 40)  # an image


def test_weights_of_measured_sizes_cover_all_that_bytes_may_be() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        dimensions, points = drawn.randint(1, 3), drawn.randint(1, 9)
        powers = list(product(range(3), repeat=dimensions))
        moments = [{p: 10 ** drawn.uniform(-3, 3) for p in drawn.sample(powers, drawn.randint(1, 3))} for _ in range(3)]

        def peak(sizes: Sizes, moments: Any = moments) -> float:
            sums = (
                sum(c * math.prod(size**n for size, n in zip(sizes[0], p, strict=True)) for p, c in one.items())
                for one in moments
            )
            return max(sums)

        measured = [(tuple(drawn.randint(2, 200) for _ in range(dimensions)),) for _ in range(points)]
        wanted = (tuple(drawn.randint(2, 250) for _ in range(dimensions)),)
        weights = covering(measured, [peak(one) for one in measured], wanted)
        if weights is None:  # one dimension was never seen to vary, and grows
            assert any(len({one[0][d] for one in measured}) == 1 for d in range(dimensions))
            continue
        charged = sum(w * peak(one) for w, one in zip(weights, measured, strict=True))
        assert charged >= peak(wanted) * (1 - 1e-9)
        assert charged <= min((peak(one) for one in measured if covers(one, wanted)), default=math.inf) * (1 + 1e-6)


def test_between_four_corners_a_product_of_sizes_is_charged_as_it_is() -> None:
    corners = [((4, 3, height, width),) for height in (32, 128) for width in (32, 128)]
    pixels = [one[0][2] * one[0][3] for one in corners]
    weights = covering(corners, pixels, ((4, 3, 96, 64),))
    assert sum(w * n for w, n in zip(weights, pixels, strict=True)) == pytest.approx(96 * 64, rel=1e-6)
    assert covering(corners, pixels, ((8, 3, 96, 64),)) is None  # nothing was seen of other batches


def test_that_no_tensor_is_squared_is_seen_where_nothing_else_explains_the_bytes() -> None:
    def crop(height: int, width: int, *more: float) -> tuple[Sizes, tuple[Any, Any]]:
        tensors = [4.0 * height * width, height * width / 4, 64.0, *more]
        return ((4, 3, height, width),), (np.array(tensors), np.array([40.0 * height * width + 1e6]))

    def seen(one: Any, other: Any) -> tuple[bool, set[int]]:
        return powers_seen(one[0], other[0], one[1], other[1])

    assert seen(crop(56, 104), crop(96, 48)) == (True, {2, 3})
    assert seen(crop(56, 104), crop(96, 104)) == (True, {2})
    squared = [crop(h, w, float(h * h * w * w)) for h, w in ((56, 104), (96, 48))]  # attention between pixels
    assert seen(*squared) == (False, {2, 3})
    assert seen(crop(64, 128), crop(128, 64)) == (True, set())  # squares of the area would be equal, too
    sizes, (tensors, peaks) = crop(112, 128)
    assert seen(crop(56, 104), (sizes, (tensors, 3 * peaks))) == (False, {2, 3})
    assert seen(crop(56, 104), crop(112, 128, 4.0)) == (False, {2, 3})  # other tensors


def test_the_degree_that_is_known_makes_the_bound_beyond_all_sizes_closer() -> None:
    points, costs, wanted = [((4, 96),)], [1.0], ((4, 192),)
    assert covering(points, costs, wanted) is None
    assert covering(points, costs, wanted, {1: 2}) == pytest.approx([(192 - 48) ** 2 / (96 - 48) ** 2])
    (linear,) = covering(points, costs, wanted, {1: 1})
    assert 2 <= linear <= 2.2


def test_other_kinds_of_input_are_other_families() -> None:
    plain = ((4, 64), "torch.int64", "cpu", False)
    assert split([plain])[0] == split([((2, 8), "torch.int64", "cpu", False)])[0]
    for other in (((4, 64, 1), *plain[1:]), (plain[0], "torch.int32", *plain[2:]), (*plain, (1, 4))):
        assert split([plain])[0] != split([other])[0]


def test_profiles_of_other_stages_are_not_mixed() -> None:
    few, many = (
        rotoff.Checkpointable(nn.Sequential(*(Residual(WIDTH) for _ in range(n)))).measure(*rows(8)).profile
        for n in (2, 3)
    )
    with pytest.raises(NotAlike):
        between([few, many], [Share(0.5, 0.5)] * 2)


def test_of_many_measured_sizes_the_last_are_kept() -> None:
    one = rotoff.Checkpointable(nn.Sequential(*(Residual(WIDTH) for _ in range(2)))).measure(*rows(8))
    measured: MeasuredSizes[Any] = MeasuredSizes()
    for size in range(30):
        measured.add(((size,),), one)
    assert len(measured) == 16
    assert measured.sizes[-1] == ((29,),)
