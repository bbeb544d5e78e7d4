"""What the runtime itself takes of the compute lane: charged by stage and by tensor, in what is expected of a step and
nowhere else."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import rotoff
from rotoff.planning.planner import make_plan
from rotoff.planning.request import Request
from rotoff.profile.profile import Profile
from rotoff.profile.timing import stage_timing
from rotoff.profile.timing.convergence import Repeats
from rotoff.profile.timing.harness import Run
from rotoff.profile.timing.overhead import MOST, RUNS, UpkeepMeter
from rotoff.profile.timing.timing_cache import StageTimes, times_of
from rotoff.runtime.execution_plan import compile_sequence, expected_step
from rotoff.runtime.overhead import NO_UPKEEP, Upkeep, UpkeepTimes
from rotoff.tensors.stage import Behaviour, SavedKind, StageModule

STAGE = rotoff.Stage("s", 10.0, 20.0, output_bytes=100, saved_bytes=300, forms=(rotoff.Form(200, 22.0),))
CHAIN = rotoff.Chain((STAGE, STAGE, STAGE), 100.0, 100.0, input_bytes=100)
UPKEEP = Upkeep(
    UpkeepTimes(0.0, 0.0, pack=0.1, unpack=0.01, move=0.001), saved=(2, 3, 4), own=(1, 2, 3), outputs=(1, 1, 1)
)


def sequence(text: str) -> rotoff.Sequence:
    return rotoff.Sequence.from_text(text.split("; "))


def test_each_tensor_is_charged_where_it_is_packed_read_and_moved() -> None:
    ops = sequence(
        "F_all 1; offload abar 1; F_sel 2 1; free abar 1; F_ck 3; F_all 3; B 3; prefetch abar 1; wait abar 1; B 2; B 1"
    ).ops
    assert UPKEEP.of(ops) == pytest.approx([0.2, 0.002, 0.3, 0, 0.4, 0.4, 0.04, 0.002, 0, 0.33, 0.02])
    assert replace(UPKEEP, times=NO_UPKEEP).of(ops) == [0.0] * len(ops)


def test_each_stage_is_charged_but_for_a_step_that_is_the_plain_one() -> None:
    ops = sequence("F_ck 1; F_all 2; F_all 3; B 3; B 2; F_all 1; B 1").ops
    upkeep = replace(UPKEEP, times=UpkeepTimes(forward=2.0, backward=3.0))
    assert upkeep.of(ops) == [2, 2, 2, 3, 3, 2, 3]
    kept = sequence("F_all 1; F_all 2; F_all 3; B 3; B 2; B 1").ops
    assert upkeep.of(kept) == [0.0] * len(kept)


def test_a_move_takes_the_lane_before_its_copy_starts() -> None:
    moved = sequence(
        "F_all 1; F_all 2; offload abar 1; F_all 3; free abar 1; B 3; prefetch abar 1; wait abar 1; B 2; B 1"
    )
    slow = replace(UPKEEP, times=UpkeepTimes(move=1.0))  # 2 s for each move of abar 1
    machine, trace = rotoff.simulate(CHAIN, moved), expected_step(CHAIN, moved, (), slow)
    assert [e.start for e in machine.events[:4]] == [0, 10, 20, 20]
    assert [e.start for e in trace.events[:4]] == [0, 10, 22, 22]
    assert trace.makespan == machine.makespan + 4
    assert (trace.peak_bytes, trace.d2h_bytes) == (machine.peak_bytes, machine.d2h_bytes)
    assert expected_step(CHAIN, moved, (), replace(UPKEEP, times=NO_UPKEEP)) == machine


def test_a_plan_expects_it_of_every_stage_unless_it_keeps_everything() -> None:
    again = sequence("F_ck 1; F_all 2; F_all 3; B 3; B 2; F_all 1; B 1")
    plan = compile_sequence(CHAIN, again, upkeep=UPKEEP)
    assert plan.trace.makespan == pytest.approx(100 + 2 * 0.2 + 0.3 + 0.4 + 0.02 + 0.03 + 0.04)
    kept = compile_sequence(CHAIN, sequence("F_all 1; F_all 2; F_all 3; B 3; B 2; B 1"), upkeep=UPKEEP)
    assert kept.trace.makespan == 90


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


def sampled(meter: UpkeepMeter, module: type[Slow] = Slow, last: bool = False) -> UpkeepTimes:
    x = torch.ones(256, 256, requires_grad=True)
    with torch.enable_grad():
        behaviour = Behaviour((SavedKind.OWN,) * 4, (True,))
        meter.sample(Run(StageModule("slow", (module(),)), [x], lambda tensors: tensors[0], last), behaviour)
    assert x.grad is None
    return meter.times()


def test_the_interpreter_is_timed_on_a_stage_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # which no other process adds to
    times = sampled(UpkeepMeter())
    assert all(0 < seconds < MOST for seconds in times[:4])
    # of a stage and a tensor they are parts, however busy the machine: a hook does less than what a stage takes
    assert times.pack < times.forward
    meter = UpkeepMeter()
    sampled(meter)
    (spans,) = meter._spans
    assert [len(found) for found in (spans.forward, spans.backward)] == [RUNS - 1] * 2
    assert [len(found) for found in (spans.pack, spans.unpack)] == [4 * (RUNS - 1)] * 2


def test_what_is_handed_along_without_gradients_does_not_matter() -> None:
    class Pair(nn.Module):
        def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x, targets = value
            return x.tanh(), targets

    pair = [torch.ones(256, requires_grad=True), torch.ones(256, dtype=torch.long)]
    meter, behaviour = UpkeepMeter(), Behaviour((SavedKind.OWN,), (True, False))
    with torch.enable_grad():
        meter.sample(Run(StageModule("pair", (Pair(),)), pair, tuple, False), behaviour)
    assert all(seconds > 0 for seconds in meter.times()[:4])
    other = UpkeepMeter()
    other.sample(Run(StageModule("pair", (Pair(),)), [t.detach() for t in pair], tuple, False), behaviour)
    assert other.times()[:4] == (0, 0, 0, 0)  # the first stage of most models: no backward ends there


def test_a_stage_that_cannot_be_run_alone_is_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rotoff"):
        times = sampled(UpkeepMeter(), Alone)
    assert times[:4] == (0, 0, 0, 0)
    (told,) = caplog.messages
    assert "stage slow did not run by itself under the interpreter (RuntimeError: where is the model?" in told
    assert sampled(UpkeepMeter(), last=True)[:4] == (0, 0, 0, 0)


def test_a_stage_that_the_host_runs_ahead_of_is_charged_nothing() -> None:
    ops = sequence(
        "F_all 1; offload abar 1; F_sel 2 1; free abar 1; F_ck 3; F_all 3; B 3; prefetch abar 1; wait abar 1; B 2; B 1"
    ).ops
    assert replace(UPKEEP, bound=(False,) * 3).of(ops) == [0.0] * len(ops)
    second = replace(UPKEEP, bound=(False, True, False)).of(ops)
    assert second == pytest.approx([0, 0, 0.3, 0, 0, 0, 0, 0, 0, 0.33, 0])
    assert replace(UPKEEP, bound=(True,) * 3).of(ops) == UPKEEP.of(ops)


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
def test_stages_whose_kernels_take_less_than_their_launches_are_flagged(
    launch: float, kernel: float, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_timing, "clock", lambda _: Ahead(launch, kernel))
    x = torch.ones(4, requires_grad=True)
    run = Run(StageModule("slow", (Slow(),)), [x], lambda tensors: tensors[0], False)
    timings = stage_timing.Timings()
    with torch.enable_grad():
        stage_timing.time_stage(run, stage_timing.End(), Repeats(3, 3), torch.device("cuda"), timings)
    assert len(timings.host) == len(timings.forward) == 3
    assert timings.host_bound is bound
    assert not stage_timing.Timings([1.0], [2.0]).host_bound  # of a device that is the host


def test_the_flag_is_kept_with_the_times() -> None:
    rows = (StageTimes("a", 1.0, 2.0, 0.0, ()), StageTimes("b", 1.0, 2.0, 0.0, (), host_bound=True))
    profile = replace(PROFILE, host_bound=(False, True))
    assert times_of(profile) == tuple(row._replace(forward_time=0.0, backward_time=0.0) for row in rows)
    assert profile.upkeep.bound == (False, True)


PAIR = rotoff.Chain((rotoff.Stage("a", 0.0, 0.0, 1, 1), rotoff.Stage("b", 0.0, 0.0, 1, 1)), 1.0, 1.0, 1)
PROFILE = Profile(torch.device("cuda", 0), PAIR, (), (), (Behaviour((), (True,)),) * 2, 0, 0)


def test_a_measured_model_knows_it_and_a_plan_that_keeps_all_does_not_pay_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(2048, 16), repeats=1)
    profile = wrapped.profile
    assert all(0 <= seconds <= MOST for seconds in profile.upkeep_times)
    assert wrapped.chain.meta["upkeep_times"] == profile.upkeep_times._asdict()
    assert profile.upkeep.saved == [len(b.saved) for b in profile.behaviours]
    known = replace(profile, upkeep_times=UpkeepTimes(0.25, 0.25, 1.0, 0.5, 2.0))
    request = Request(wrapped.keep_all_memory, "remat", 50, {})
    assert make_plan(known, request).trace.makespan == pytest.approx(wrapped.chain.compute_time)
    plan = make_plan(known, replace(request, mem_limit=int(0.7 * wrapped.keep_all_memory)))
    more = known.upkeep.of(plan.sequence.ops)
    assert sum(more) >= 1.5
    assert plan.trace.makespan == expected_step(wrapped.chain, plan.sequence, known.tail_times, known.upkeep).makespan
    wrapped.close()
