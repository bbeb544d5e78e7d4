"""What the runtime itself takes of the compute lane: charged by stage and by tensor, in the chain of a planned step."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rotoff
from rotoff.core.sequence import FORWARDS
from rotoff.planning.planner import make_plan
from rotoff.planning.request import Request
from rotoff.profile.profile import Profile
from rotoff.profile.stage_meter import Meter
from rotoff.profile.timing import stage_timing
from rotoff.profile.timing.convergence import Repeats
from rotoff.profile.timing.harness import Run
from rotoff.profile.timing.overhead import MAX_SECONDS, RUNS, OverheadMeter
from rotoff.profile.timing.timing_cache import StageTimes, known_times, times_of
from rotoff.runtime.overhead import NO_OVERHEAD, OverheadTimes
from rotoff.tensors.stage import Behaviour, SavedKind, StageModule

pytestmark = pytest.mark.full_timing

STAGE = rotoff.Stage("s", 10.0, 20.0, output_bytes=100, saved_bytes=300, forms=(rotoff.Form(200, 22.0),))


def test_overhead_is_charged_per_stage_and_saved_tensor() -> None:
    times = OverheadTimes(forward=2.0, backward=3.0, pack=0.1, unpack=0.01)
    stage = times.added_to(STAGE, saved=4)
    assert (stage.forward_time, stage.backward_time) == pytest.approx((12.4, 23.04))
    assert stage.forms[0].backward_time == pytest.approx(22 + 3.44)  # what it redoes is packed once more
    assert replace(stage, forward_time=10.0, backward_time=20.0, forms=STAGE.forms) == STAGE
    assert NO_OVERHEAD.added_to(STAGE, saved=4) == STAGE


class Slow(nn.Module):
    """Saves four tensors; its forward and its backward leave Python for a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.tanh()
        return x


class Alone(Slow):
    """Cannot be run but in the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise RuntimeError("where is the model?")


def sampled(meter: OverheadMeter, module: type[Slow] = Slow, last: bool = False) -> OverheadTimes:
    x = torch.ones(256, 256, requires_grad=True)
    with torch.enable_grad():
        behaviour = Behaviour((SavedKind.OWN,) * 4, (True,))
        run = Run(StageModule("slow", (module(),)), [x], lambda tensors: tensors[0], last, outputs=[x.detach()])
        meter.sample(run, behaviour)
    assert x.grad is None
    return meter.times()


def test_overhead_is_timed_on_stages_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # which no other process adds to
    times = sampled(OverheadMeter())
    assert all(0 < seconds < MAX_SECONDS for seconds in times)
    # of a stage and a tensor they are parts, however busy the machine: a hook does less than what a stage takes
    assert times.pack < times.forward
    meter = OverheadMeter()
    sampled(meter)
    (spans,) = meter._spans
    assert [len(found) for found in (spans.forward, spans.backward)] == [RUNS - 1] * 2
    assert [len(found) for found in (spans.pack, spans.unpack)] == [4 * (RUNS - 1)] * 2


class Kernels(TorchDispatchMode):
    """A clock that only kernels of tanh move on, by a second each."""

    now = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def test_overhead_leaves_out_the_calls_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = OverheadMeter()
    with Kernels() as clock:
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        sampled(meter)
    assert clock.now == 4 * RUNS
    (spans,) = meter._spans
    assert spans.forward == [0.0] * (RUNS - 1)


def test_overhead_ignores_inputs_without_gradients() -> None:
    class Pair(nn.Module):
        def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x, targets = value
            return x.tanh(), targets

    pair = [torch.ones(256, requires_grad=True), torch.ones(256, dtype=torch.long)]
    meter, behaviour = OverheadMeter(), Behaviour((SavedKind.OWN,), (True, False))
    with torch.enable_grad():
        meter.sample(Run(StageModule("pair", (Pair(),)), pair, tuple, False, outputs=pair), behaviour)
    assert all(seconds > 0 for seconds in meter.times())
    other = OverheadMeter()
    other.sample(Run(StageModule("pair", (Pair(),)), [t.detach() for t in pair], tuple, False), behaviour)
    assert other.times() == (0, 0, 0, 0)  # the first stage of most models: no backward ends there


def test_overhead_skips_stage_that_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rotoff"):
        times = sampled(OverheadMeter(), Alone)
    assert times == (0, 0, 0, 0)
    (told,) = caplog.messages
    assert "stage slow failed by itself under the interpreter (RuntimeError: where is the model?" in told
    assert sampled(OverheadMeter(), last=True) == (0, 0, 0, 0)


def test_device_bound_stage_is_charged_no_overhead() -> None:
    times = OverheadTimes(forward=2.0, pack=0.5)
    profile = replace(PROFILE, behaviours=(Behaviour((SavedKind.OWN,) * 2, (True,)),) * 2, overhead_times=times)

    def forwards(bound: tuple[bool, ...]) -> list[float]:
        return [stage.forward_time for stage in replace(profile, host_bound=bound).with_overhead().chain.stages]

    assert forwards((False, False)) == [0.0, 0.0]
    assert forwards((False, True)) == [0.0, 3.0]
    assert forwards((True, True)) == forwards(()) == [3.0, 3.0]  # empty: host and device are one
    once = profile.with_overhead()
    assert once.with_overhead() == once


class Ahead:
    """A clock of a device that takes `kernel` seconds for what the host launches in `launch` seconds."""

    def __init__(self, launch: float, kernel: float) -> None:
        self.ticks, self.launch, self.kernel = 0, launch, kernel

    def tick(self) -> None:
        self.ticks += 1

    def spans(self) -> list[float]:
        return [max(self.launch, self.kernel)] * self.ticks  # events cannot be closer together than their launches

    def host_spans(self) -> list[float]:
        return [self.launch] * self.ticks


@pytest.mark.parametrize(("launch", "kernel", "bound"), [(1e-3, 1e-4, True), (1e-3, 2e-3, False), (1e-4, 1e-3, False)])
def test_stages_slower_to_launch_than_run_are_host_bound(
    launch: float, kernel: float, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_timing, "Clock", lambda _: Ahead(launch, kernel))
    x = torch.ones(4, requires_grad=True)
    run = Run(StageModule("slow", (Slow(),)), [x], lambda tensors: tensors[0], False, outputs=[torch.ones(4)])
    timings = stage_timing.Timings()
    with torch.enable_grad():
        stage_timing.time_stage(run, stage_timing.EarlyStop(), Repeats(3, 3), torch.device("cuda"), timings)
    assert len(timings.host) == len(timings.forward) == 3
    assert timings.host_bound is bound
    assert not stage_timing.Timings([1.0], [2.0]).host_bound  # of a device that is the host


def test_host_bound_is_cached_with_the_times() -> None:
    rows = (StageTimes("a", 1.0, 2.0, 0.0, ()), StageTimes("b", 1.0, 2.0, 0.0, (), host_bound=True))
    profile = replace(PROFILE, host_bound=(False, True))
    assert times_of(profile) == tuple(row._replace(forward_time=0.0, backward_time=0.0) for row in rows)


PAIR = rotoff.Chain((rotoff.Stage("a", 0.0, 0.0, 1, 1), rotoff.Stage("b", 0.0, 0.0, 1, 1)), 1.0, 1.0, 1)
PROFILE = Profile(torch.device("cuda", 0), PAIR, (), (), (Behaviour((), (True,)),) * 2, 0, 0)


def test_overhead_is_measured_and_not_charged_for_keeping_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(2048, 16))
    profile = wrapped.profile
    assert all(0 <= seconds <= MAX_SECONDS for seconds in profile.overhead_times)
    assert wrapped.chain.meta["upkeep_times"] == profile.overhead_times._asdict()
    known = replace(profile, overhead_times=OverheadTimes(0.25, 0.25, 1.0, 0.5))
    request = Request(wrapped.keep_all_memory, "remat", 50, {})
    assert make_plan(known, request).trace.makespan == pytest.approx(wrapped.chain.compute_time)
    plan = make_plan(known, replace(request, mem_limit=int(0.7 * wrapped.keep_all_memory)))
    assert plan.chain == known.with_overhead().chain
    more = plan.trace.makespan - rotoff.simulate(profile.chain, plan.sequence).makespan
    forwards = sum(op.kind in FORWARDS for op in plan.sequence)
    assert more >= 0.25 * (forwards + len(profile.chain))
    wrapped.close()


def test_overhead_is_not_timed_on_long_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    monkeypatch.setattr(Meter, "_times", lambda *_: stage_timing.Timings([0.05], [0.06]))
    wrapped = rotoff.Checkpointable(model, forms=False, cache_directory=None).measure(torch.randn(8, 16))
    assert wrapped.profile.overhead_times == NO_OVERHEAD
    assert known_times(wrapped.profile).overhead is None  # a smaller input has shorter stages
    wrapped.close()


def test_simulated_makespan_equals_expected_makespan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(2048, 16))
    for share in (1.0, 0.7, 0.5):
        wrapped.compute_sequence(int(share * wrapped.keep_all_memory))
        assert rotoff.simulate(wrapped.chain, wrapped.sequence).makespan == wrapped.get_expected_makespan()
    wrapped.close()
