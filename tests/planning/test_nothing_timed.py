"""Where keeping everything fits, bytes are all that is measured; times follow when somebody asks for them."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import ALL, fresh, residual, same, train
from torch import nn

import rotoff
from rotoff.planning import course_meter, planner
from rotoff.planning.request import Request
from rotoff.planning.specialization import Specialization
from rotoff.profile import stage_meter
from rotoff.profile.measure import UsedForm
from rotoff.profile.profile import Profile
from rotoff.profile.selective.variant_run import VariantRun
from rotoff.runtime.links.pool import LinkPool

ROOM = "1 TiB"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something is timed, or a smaller form looked for."""
    seen: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(stage_meter, "time_stage")
    count(stage_meter.FormMeter, "find")
    for name in ("sample_overhead", "overhead_times", "copy_bandwidth"):
        count(stage_meter.Meter, name)
    count(LinkPool, "bandwidth")
    return seen


def in_room(model: nn.Module, **options: Any) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, cache_directory=None, **options).compute_sequence(ROOM)


def latest(wrapped: rotoff.Checkpointable) -> Specialization:
    found = wrapped._specializations.latest
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.grid
def test_with_room_for_everything_nothing_is_timed_and_bytes_are_the_same(kind: str, calls: Counter[str]) -> None:
    model, batch = fresh(kind)
    plain = copy.deepcopy(model)
    options = {"cache_directory": None, "forms": False}  # of which there are more or fewer by what they take
    measured = rotoff.Checkpointable(copy.deepcopy(model), **options).measure(batch())
    calls.clear()
    wrapped = in_room(model, forms=False)
    assert same(train(wrapped, batch), train(plain, batch))
    assert not calls
    assert not latest(wrapped).profile.timed
    measured.compute_sequence(ROOM)
    assert wrapped.get_expected_memory() == measured.get_expected_memory()
    assert wrapped.keep_all_memory == measured.keep_all_memory
    assert not calls
    one = wrapped.profile  # and once they are timed
    assert one.timed and calls["time_stage"]
    assert wrapped.keep_all_memory == measured.keep_all_memory
    theirs = measured.profile
    assert [stage.saved_bytes for stage in one.chain.stages] == [stage.saved_bytes for stage in theirs.chain.stages]
    assert one.unmanaged_bytes == theirs.unmanaged_bytes
    assert wrapped.min_mem_limit() == measured.min_mem_limit()


def test_what_is_asked_later_is_right(calls: Counter[str], caplog: pytest.LogCaptureFixture) -> None:
    model, batch = residual()
    forwards = []
    model[0].register_forward_hook(lambda *_: forwards.append(1))
    wrapped = in_room(model)
    with caplog.at_level(logging.INFO, "rotoff"):
        train(wrapped, batch, steps=2)
    assert "the model runs as it is" in caplog.text and "step 0" not in caplog.text
    (row,) = wrapped.plans()
    assert (row.makespan, row.overhead) == (None, None) and row.memory == wrapped.get_expected_memory()
    made = len(forwards)
    seconds = wrapped.get_expected_makespan()
    assert len(forwards) == made  # the model's own code has not run again
    assert seconds == pytest.approx(wrapped.chain.compute_time) and seconds > 0
    assert all(stage.forward_time > 0 and stage.backward_time > 0 for stage in wrapped.chain.stages)
    assert wrapped.chain.d2h_bandwidth > 1e3 and any(stage.forms for stage in wrapped.chain.stages)
    (row,) = wrapped.plans()
    assert (row.makespan, row.overhead) == (seconds, 0)
    assert calls["time_stage"] and calls["bandwidth"] == 1
    calls.clear()
    profile = wrapped.profile
    train(wrapped, batch, steps=1)
    assert not calls and wrapped.profile is profile and wrapped.get_expected_makespan() == seconds


@pytest.mark.parametrize("ask", ["chain", "sequence", "profile"])
def test_whatever_shows_times_measures_them(ask: str, calls: Counter[str], tmp_path: Path) -> None:
    model, batch = residual()
    wrapped = in_room(model)
    train(wrapped, batch, steps=1)
    shown = getattr(wrapped, ask)
    assert calls["time_stage"]
    assert wrapped.profile.timed
    if ask == "chain":
        shown.save(tmp_path / "chain.json")
        assert rotoff.Chain.load(tmp_path / "chain.json").compute_time > 0
    if ask == "sequence":
        assert shown.meta["expected"]["keep_all_time"] == wrapped.get_expected_makespan() > 0


def test_without_a_plan_no_times_are_measured_to_say_so(calls: Counter[str]) -> None:
    model, batch = residual()
    wrapped = in_room(model)
    train(wrapped, batch, steps=1)
    latest(wrapped).plan = None
    with pytest.raises(rotoff.MeasureError, match="nothing has been planned"):
        wrapped.get_expected_makespan()
    assert not calls


def test_a_smaller_limit_is_planned_at_once() -> None:
    model, batch = residual()
    plain = copy.deepcopy(model)
    wrapped = in_room(model)
    ours, theirs = train(wrapped, batch, steps=1), train(plain, batch, steps=1)
    assert same(ours, theirs)
    limit = wrapped.keep_all_memory * 6 // 10
    wrapped.compute_sequence(limit, refine=False)
    assert wrapped.get_expected_makespan() > wrapped.chain.compute_time
    assert same(train(wrapped, batch), train(plain, batch))
    x = batch()
    assert peak_bytes(lambda: wrapped(x).sum().backward()) <= wrapped.get_expected_memory() <= limit
    least = wrapped.min_mem_limit()
    with pytest.raises(rotoff.InfeasibleError) as error:
        wrapped.compute_sequence(least - 1)
    assert error.value.min_mem_limit == least


def test_a_limit_that_is_too_small_leaves_the_plan_as_it_was() -> None:
    model, batch = residual()
    wrapped = in_room(model)
    train(wrapped, batch, steps=1)
    with pytest.raises(rotoff.InfeasibleError):
        wrapped.compute_sequence(1)
    assert wrapped.mem_limit == 2**40
    assert wrapped.get_expected_makespan() == pytest.approx(wrapped.chain.compute_time)
    train(wrapped, batch, steps=1)


def test_a_limit_without_room_is_met_in_the_first_step(calls: Counter[str]) -> None:
    model, batch = residual()
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(batch())
    least = probe.min_mem_limit()
    calls.clear()
    wrapped = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(least + 4096, refine=False)
    plain = copy.deepcopy(model)
    assert same(train(wrapped, batch), train(plain, batch))
    assert calls["time_stage"] and latest(wrapped).profile.timed
    assert [stage.saved_bytes for stage in wrapped.profile.chain.stages] == [
        stage.saved_bytes for stage in probe.profile.chain.stages
    ]
    assert wrapped.min_mem_limit() == least


@pytest.fixture
def measured_forms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages whose forms were measured, once for each form."""
    seen: list[str] = []
    own = VariantRun.costs

    def counted(self: VariantRun, backward_time: float) -> rotoff.Form:
        seen.append(self._run.stage.name)
        return own(self, backward_time)

    monkeypatch.setattr(VariantRun, "costs", counted)
    return seen


def first_use(model: nn.Module, batch: Any, share: float, **options: Any) -> tuple[rotoff.Checkpointable, int]:
    """`model`, yet to be measured, within `share` of what it may need; and the least that it needs."""
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(batch())
    least, most = probe.min_mem_limit(), probe.keep_all_memory
    limit = int(least + share * (most - least))
    wrapped = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(limit, **options)
    return wrapped, least


def test_forms_that_a_short_search_does_not_use_are_not_measured(
    measured_forms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = residual()
    plain = copy.deepcopy(model)
    wrapped, least = first_use(model, batch, 0.5, refine=False)
    every = len(measured_forms)
    assert every
    measured_forms.clear()
    monkeypatch.setattr("rotoff.planning.measured_courses.useful_forms", lambda profile, request: [])
    assert same(train(wrapped, batch), train(plain, batch))
    profile = latest(wrapped).profile
    assert not measured_forms and not any(stage.forms for stage in profile.chain.stages)
    assert "the limit does not need them" in profile.no_forms
    assert wrapped.min_mem_limit() == least  # which may need any form, so that all are measured for it
    assert len(measured_forms) == every


def test_forms_that_a_short_search_uses_are_measured_for_the_stages_of_its_kind(
    measured_forms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = residual()
    plain = copy.deepcopy(model)
    wrapped, _ = first_use(model, batch, 0.2, mode="remat", refine=False)
    measured_forms.clear()
    found: list[UsedForm] = []

    def used(profile: Profile, request: Request) -> list[UsedForm]:
        estimated = [(i, b) for i, b in enumerate(profile.behaviours, start=1) if b.forms]
        found.append(UsedForm(estimated[-1][0], estimated[-1][1].forms[-1].identity))
        return found

    monkeypatch.setattr("rotoff.planning.measured_courses.useful_forms", used)
    assert same(train(wrapped, batch), train(plain, batch))
    profile = latest(wrapped).profile
    assert len(measured_forms) == 1
    recipes = [[recipe.identity for recipe in behaviour.forms] for behaviour in profile.behaviours]
    assert recipes[found[0].stage - 1] == [found[0].identity]
    assert {len(one) for one in recipes} == {0, 1}
    assert profile.formed_for.startswith(f"{wrapped.mem_limit} bytes")


class Fan(nn.Module):
    """Its output takes more than what it saves; a form need not make the output again."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        for _ in range(6):
            x = x.exp().sin()
        return torch.cat([x] * 8, dim=1)


class Sum(nn.Module):
    """Saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), 8, 64).sum(dim=1)


def test_estimated_forms_need_no_larger_limit_than_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped() -> rotoff.Checkpointable:
        blocks = nn.Sequential(Fan(), Sum(), Fan(), Sum(), nn.Linear(64, 8))
        return rotoff.Checkpointable(blocks, stages=list(blocks), cache_directory=None)

    x = torch.randn(256, 64)
    probe = wrapped().measure(x)
    assert any(probe.profile.forms)
    least: list[int] = []
    monkeypatch.setattr(
        "rotoff.planning.measured_courses.useful_forms",
        lambda profile, request: least.append(planner.least_limit(profile, request)),
    )
    wrapped().compute_sequence(probe.min_mem_limit(), refine=False)(x).sum().backward()
    assert 0 < least[0] <= 1.01 * probe.min_mem_limit()


def test_another_limit_gets_the_forms_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = residual()
    wrapped, least = first_use(model, batch, 0.5, refine=False)
    asked: list[int] = []
    own = planner.useful_forms

    def noted(profile: Profile, request: Request) -> Any:
        asked.append(request.mem_limit)
        return own(profile, request)

    monkeypatch.setattr("rotoff.planning.measured_courses.useful_forms", noted)
    train(wrapped, batch, steps=2)
    limits = [wrapped.mem_limit, least + 4096]
    wrapped.compute_sequence(limits[1], refine=False)
    train(wrapped, batch, steps=2)
    assert asked == limits
    x = batch()
    assert peak_bytes(lambda: wrapped(x).sum().backward()) <= wrapped.get_expected_memory() <= limits[1]


def test_forms_for_a_limit_are_cached_for_that_limit(tmp_path: Path, calls: Counter[str]) -> None:
    model, batch = residual()
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(batch())
    limits = [(probe.min_mem_limit() + probe.keep_all_memory) // 2, probe.min_mem_limit() + 4096]
    for limit, new in ((limits[0], True), (limits[0], False), (limits[1], True), (limits[1], False)):
        calls.clear()
        wrapped = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=tmp_path)
        train(wrapped.compute_sequence(limit, refine=False), batch, steps=1)
        assert bool(calls["time_stage"]) is new, limit
        assert latest(wrapped).profile.formed_for.startswith(f"{limit} bytes")
        wrapped.close()


def test_a_size_that_is_known_not_to_fit_is_measured_in_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []
    for name in ("measure", "measure_bytes", "measure_times"):
        own = getattr(course_meter, name)
        monkeypatch.setattr(
            course_meter, name, lambda *args, name=name, own=own, **more: walks.append(name) or own(*args, **more)
        )
    probe = rotoff.Checkpointable(layers(), cache_directory=None).measure(sized(1024))
    wrapped = rotoff.Checkpointable(layers(), cache_directory=None)
    wrapped.compute_sequence(probe.keep_all_memory * 5 // 8, refine=False)
    walks.clear()
    wrapped(sized(800)).sum().backward()
    assert walks == ["measure_bytes", "measure_times"]
    monkeypatch.setattr("rotoff.planning.known_sizes.KnownSizes.between", lambda *_: None)
    walks.clear()
    wrapped(sized(1024)).sum().backward()
    assert walks == ["measure"]
    assert wrapped.get_expected_memory() <= wrapped.mem_limit


def test_a_policy_is_planned_though_everything_fits(calls: Counter[str]) -> None:
    model, batch = residual()
    wrapped = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(ROOM, policy="vdnn")
    train(wrapped, batch, steps=1)
    assert calls["time_stage"] and latest(wrapped).profile.timed


def sized(rows: int) -> torch.Tensor:
    return torch.randn(rows, 32)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))


def test_another_size_that_does_not_fit_is_timed_and_those_that_fit_are_not(calls: Counter[str]) -> None:
    model = layers()
    plain = copy.deepcopy(model)
    probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(sized(512))
    limit = probe.keep_all_memory * 7 // 10
    wrapped = rotoff.Checkpointable(model, cache_directory=None).compute_sequence(limit, refine=False)
    for rows in (64, 96, 80, 512, 480, 96, 448, 512, 64):
        if rows in (64, 96, 80):
            calls.clear()
        x = sized(rows)

        def step(run: nn.Module, x: torch.Tensor = x) -> None:
            run(x).square().sum().backward()

        peak = peak_bytes(lambda step=step: step(wrapped)) if rows in known_sizes(wrapped) else step(wrapped)
        step(plain)
        assert peak is None or peak <= limit
        if rows in (64, 96, 80):
            assert not calls, rows
            assert latest(wrapped).plan is not None and latest(wrapped).plan.keeps_all
        else:
            assert not latest(wrapped).plan.keeps_all and wrapped.get_expected_makespan() > 0
        assert wrapped.get_expected_memory() <= limit
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    timed = {row.shapes[0][0]: row.makespan is not None for row in wrapped.plans()}
    assert (timed[64], timed[512]) == (False, True)


def test_a_second_size_that_takes_a_third_of_the_limit_is_timed_so_that_larger_ones_are_planned_unmeasured(
    calls: Counter[str],
) -> None:
    probe = rotoff.Checkpointable(layers(), cache_directory=None).measure(sized(512))
    wrapped = rotoff.Checkpointable(layers(), cache_directory=None)
    wrapped.compute_sequence(probe.keep_all_memory * 7 // 10, refine=False)
    calls.clear()
    wrapped(sized(64)).sum().backward()
    assert not calls
    wrapped(sized(192)).sum().backward()
    assert calls["time_stage"] and latest(wrapped).plan.keeps_all
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotoff.profile.stage_meter.Meter.stage", None)  # nothing is measured
        wrapped(sized(512)).sum().backward()
    assert not calls and not latest(wrapped).plan.keeps_all
    assert wrapped.get_expected_memory() <= wrapped.mem_limit


def known_sizes(wrapped: rotoff.Checkpointable) -> set[int]:
    """Batches whose steps measure nothing any more."""
    return {row.shapes[0][0] for row in wrapped.plans()}


def test_a_size_that_follows_from_others_has_times_when_asked(calls: Counter[str]) -> None:
    wrapped = in_room(layers())
    for rows in (64, 128, 96):
        wrapped(sized(rows)).sum().backward()
    assert not calls
    assert len(wrapped.plans()) == 3
    assert not wrapped.plans()[-1].measured
    seconds = wrapped.get_expected_makespan()
    assert calls["time_stage"] and seconds == pytest.approx(wrapped.chain.compute_time) and seconds > 0
    assert wrapped.chain.input_bytes == 96 * 32 * 4
    calls.clear()
    wrapped(sized(96)).sum().backward()
    assert not calls and wrapped.get_expected_makespan() == seconds


def test_a_size_that_follows_from_others_is_measured_by_its_step_for_a_smaller_limit(calls: Counter[str]) -> None:
    """The model's own forward runs once in it, as in any other step."""
    forwards, model = [], layers()
    model[0][0].register_forward_hook(lambda *_: forwards.append(1))
    wrapped = in_room(model)
    for rows in (64, 128, 96, 128):
        wrapped(sized(rows)).sum().backward()
    wrapped.compute_sequence(wrapped.keep_all_memory * 7 // 10, refine=False)  # for 128 rows
    assert calls["time_stage"]
    made = len(forwards)
    for rows in (96, 64, 96):
        wrapped(sized(rows)).sum().backward()
        assert latest(wrapped).profile.timed or latest(wrapped).plan.keeps_all
    assert len(forwards) - made == 3
    assert wrapped.get_expected_memory() <= wrapped.mem_limit


def test_a_profiler_keeps_times_from_being_measured(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = residual()
    wrapped = in_room(model, interpolate=False)  # so that x needs times of its own
    x, y = batch()[:60], batch()
    for one in (x, y):
        wrapped(one).sum().backward()
    limit = wrapped.keep_all_memory * 6 // 10  # of y
    wrapped.compute_sequence(limit, refine=False)
    with torch.autograd.profiler.profile():
        wrapped(x).sum().backward()
    assert "runs as the plain model, without a limit" in caplog.text
    wrapped(x).sum().backward()
    assert latest(wrapped).profile.timed and wrapped.get_expected_memory() <= limit


def test_the_largest_input_is_not_timed_where_it_fits(calls: Counter[str]) -> None:
    wrapped = rotoff.Checkpointable(layers(), cache_directory=None).compute_sequence(ROOM, up_to=sized(128))
    wrapped(sized(128)).sum().backward()
    wrapped(sized(100)).sum().backward()
    assert not calls
    assert wrapped.get_expected_makespan() > 0
    small = rotoff.Checkpointable(layers(), cache_directory=None).measure(sized(128))
    limit = small.keep_all_memory * 8 // 10
    calls.clear()
    wrapped.compute_sequence(limit, up_to=sized(128), refine=False)
    assert calls["time_stage"] and wrapped.get_expected_memory() <= limit


def test_times_are_those_of_the_step_under_autocast_and_in_training() -> None:
    """Also where the model is asked outside of autocast, and in eval mode without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        probe = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=None).measure(x)
        wrapped = in_room(model)
        wrapped(x).sum().backward()
    expected = [stage.saved_bytes for stage in probe.chain.stages]
    wrapped.eval()
    drawn = torch.get_rng_state()
    with torch.no_grad():
        assert wrapped.get_expected_makespan() > 0
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not wrapped.training and not model[1].training
    assert [stage.saved_bytes for stage in wrapped.chain.stages] == expected


class Watched(nn.Module):
    """Needs its batch in the graph of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def test_no_graph_and_no_batch_but_the_last_is_held(calls: Counter[str]) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    before, wrapped = nn.Linear(8, 8), in_room(Watched())
    seen, graphs = [], []
    for _ in range(3):
        x = before(torch.randn(4, 8))
        seen.append(StorageWeakRef(x.untyped_storage()))
        graphs.append(torch.autograd.graph.get_gradient_edge(x).node)
        wrapped(x).sum().backward()
        del x
    assert [one.expired() for one in seen] == [True, True, False]
    assert before.weight.grad is not None
    assert wrapped.get_expected_makespan() > 0 and calls["time_stage"]
    assert seen[-1].expired()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a cache whose times hold, however busy the machine is."""
    monkeypatch.setattr("rotoff.profile.timing.timing_cache.TOLERANCE", float("inf"))
    return tmp_path


def test_a_kept_profile_without_times_is_not_one_with_times(directory: Path, calls: Counter[str]) -> None:
    def run() -> rotoff.Checkpointable:
        model, batch = residual()
        wrapped = rotoff.Checkpointable(model, cache_directory=directory).compute_sequence(ROOM)
        train(wrapped, batch, steps=1)
        return wrapped

    first = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotoff.profile.stage_meter.Meter.stage", None)  # nothing is measured
        second = run()
    assert not calls and not latest(second).profile.timed
    assert second.get_expected_memory() == first.get_expected_memory()
    seconds = second.get_expected_makespan()
    assert seconds > 0 and calls["time_stage"]
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotoff.profile.stage_meter.Meter.stage", None)
        third = run()  # whose times are known
        assert third.get_expected_makespan() == seconds
    assert not calls


def test_a_recorded_step_has_times_to_compare_with(calls: Counter[str]) -> None:
    model, batch = residual()
    wrapped = in_room(model)
    with wrapped.record_step() as recorded:
        train(wrapped, batch, steps=1)
    assert calls["time_stage"] and recorded.trace.makespan > 0
    assert wrapped.get_expected_makespan() == pytest.approx(wrapped.chain.compute_time)


def test_a_checked_step_needs_no_times(calls: Counter[str]) -> None:
    """Its stages run under rotoff though everything is kept."""
    model, batch = residual()
    plain = copy.deepcopy(model)
    wrapped = in_room(model, check=True)
    assert same(train(wrapped, batch), train(plain, batch))
    assert not calls
