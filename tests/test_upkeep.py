"""What the runtime itself takes of the compute lane: charged by tensor, in what is expected of a step and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import rotoff
from rotoff.profile import upkeep_times
from rotoff.profile.upkeep_times import MOST, measure_upkeep, typical
from rotoff.runtime.plan import compile_sequence, expected_step
from rotoff.runtime.planning import Request, make_plan
from rotoff.runtime.upkeep import NO_UPKEEP, Upkeep, UpkeepTimes

STAGE = rotoff.Stage("s", 10.0, 20.0, output_bytes=100, saved_bytes=300, forms=(rotoff.Form(200, 22.0),))
CHAIN = rotoff.Chain((STAGE, STAGE, STAGE), 100.0, 100.0, input_bytes=100)
UPKEEP = Upkeep(UpkeepTimes(pack=0.1, unpack=0.01, move=0.001), saved=(2, 3, 4), own=(1, 2, 3), outputs=(1, 1, 1))


def sequence(text: str) -> rotoff.Sequence:
    return rotoff.Sequence.from_text(text.split("; "))


def test_each_tensor_is_charged_where_it_is_packed_read_and_moved() -> None:
    ops = sequence(
        "F_all 1; offload abar 1; F_sel 2 1; free abar 1; F_ck 3; F_all 3; B 3; prefetch abar 1; wait abar 1; B 2; B 1"
    ).ops
    assert UPKEEP.of(ops, ()) == pytest.approx([0.2, 0.002, 0.3, 0, 0.4, 0.4, 0.04, 0.002, 0, 0.33, 0.02])
    assert UPKEEP.of(ops, {1, 3}) == pytest.approx([0, 0.002, 0.3, 0, 0, 0, 0, 0.002, 0, 0.33, 0])
    assert replace(UPKEEP, times=NO_UPKEEP).of(ops, ()) == [0.0] * len(ops)


def test_a_move_takes_the_lane_before_its_copy_starts() -> None:
    moved = sequence("F_all 1; F_all 2; offload abar 1; F_all 3; free abar 1; B 3; prefetch abar 1; wait abar 1; B 2; B 1")
    slow = replace(UPKEEP, times=UpkeepTimes(0.0, 0.0, 1.0))  # 2 s for each move of abar 1
    machine, trace = rotoff.simulate(CHAIN, moved), expected_step(CHAIN, moved, (), slow)
    assert [e.start for e in machine.events[:4]] == [0, 10, 20, 20]
    assert [e.start for e in trace.events[:4]] == [0, 10, 22, 22]
    assert trace.makespan == machine.makespan + 4
    assert (trace.peak_bytes, trace.d2h_bytes) == (machine.peak_bytes, machine.d2h_bytes)
    assert expected_step(CHAIN, moved, (), replace(UPKEEP, times=NO_UPKEEP)) == machine


def test_a_plan_expects_it_of_the_stages_that_run_under_hooks() -> None:
    again = sequence("F_ck 1; F_all 2; F_all 3; B 3; B 2; F_all 1; B 1")
    plan = compile_sequence(CHAIN, again, upkeep=UPKEEP)
    assert plan.untouched == {2, 3}
    assert plan.trace.makespan == pytest.approx(100 + 0.2 + 0.2 + 0.02)
    kept = compile_sequence(CHAIN, sequence("F_all 1; F_all 2; F_all 3; B 3; B 2; B 1"), upkeep=UPKEEP)
    assert kept.trace.makespan == 90


def test_noise_adds_and_nothing_is_taken_for_more_than_it_can_be() -> None:
    assert typical([5e-6, 6e-6, 7e-6, 1.0], [1e-6, 2e-6, 3e-6, 4e-6]) == pytest.approx(4e-6)
    assert typical([1e-6] * 4, [2e-6] * 4) == 0
    assert typical([1.0] * 4, [2e-6] * 4) == MOST


def test_a_device_that_the_host_runs_ahead_of_is_charged_nothing() -> None:
    assert measure_upkeep(torch.device("cuda"), 1e6) == NO_UPKEEP


def test_the_probe_reads_the_clock_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes by one for each call of it: nothing takes longer than anything else."""

    class Clock:
        now = 0.0

        def thread_time(self) -> float:
            self.now += 1e-6
            return self.now

    monkeypatch.setattr(upkeep_times, "time", Clock())
    pack, unpack, move = measure_upkeep(torch.device("cpu"), 100.0)
    assert (pack, unpack) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    assert move == pytest.approx((4 - 2 * 2) * 1e-6 / (2 * upkeep_times.TENSORS), abs=1e-12)


def test_a_measured_model_knows_it_and_a_plan_that_keeps_all_does_not_pay_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)])
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(2048, 16), repeats=1)
    profile = wrapped.profile
    assert all(0 <= seconds <= MOST for seconds in profile.upkeep_times)
    assert wrapped.chain.meta["upkeep_times"] == profile.upkeep_times._asdict()
    assert profile.upkeep.saved == [len(b.saved) for b in profile.behaviours]
    known = replace(profile, upkeep_times=UpkeepTimes(1.0, 0.5, 2.0))
    request = Request(wrapped.keep_all_memory, "remat", 50, {})
    assert make_plan(known, request).trace.makespan == pytest.approx(wrapped.chain.compute_time)
    plan = make_plan(known, replace(request, mem_limit=int(0.7 * wrapped.keep_all_memory)))
    more = known.upkeep.of(plan.sequence.ops, plan.untouched)
    assert sum(more) >= 1.5
    assert plan.trace.makespan == expected_step(wrapped.chain, plan.sequence, known.tail_times, known.upkeep).makespan
    wrapped.close()
