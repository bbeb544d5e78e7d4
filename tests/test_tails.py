"""What a closing replay leaves out: how long that is, and what is expected of steps and plans with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from models import same
from test_runtime import with_sequence
from torch import nn

import rotoff
from rotoff.planning.planner import make_plan
from rotoff.planning.request import Request
from rotoff.profile.between_sizes import Share, between
from rotoff.profile.estimate.devices import Device
from rotoff.profile.estimate.estimate import estimate_profile
from rotoff.profile.profile import Profile
from rotoff.profile.timing.stage_timing import HostClock
from rotoff.runtime.early_stop import expected_trace, tails_in_backward
from rotoff.solver.bounds import least_time_of
from rotoff.tensors.stage import Behaviour

TAILS = (0.5, 1.0, 0.0)
CHAIN = rotoff.Chain(tuple(rotoff.Stage(str(i), 10.0 * i, 20.0 * i, 10, 50) for i in (1, 2, 3)), 1.0, 1.0)
BATCH, WIDTH = 128, 192


class Third(nn.Module):
    """Three equal products; the last one, whose result only the next stage needs, runs after all has been saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Ended(nn.Module):
    """Its result is what it saved last."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.only(x))


def stack() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Third(), Ended(), Third(), Third()), torch.randn(BATCH, WIDTH)


def count_only(flops: float) -> Device:
    """A device on which nothing but operations takes time."""
    return Device("count", 1 << 40, 1e30, {"float32": flops}, 1e9, 1e9, capability=None, launch_time=1e-30)


# -- what is expected of a step


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        # 180 s in all, and each forward that runs again: the closing ones by their tails less
        ("F_all 1; F_all 2; F_all 3; B 3; B 2; B 1", 180.0),
        ("F_ck 1; F_ck 2; F_all 3; B 3; F_all 2; B 2; F_all 1; B 1", 180 + (20 - 1.0) + (10 - 0.5)),
        ("F_ck 1; F_none 2; F_all 3; B 3; F_all 1; F_all 2; B 2; B 1", 180 + 10 + (20 - 1.0)),
        ("F_ck 1; F_none 2; F_all 3; F_all 1; F_all 2; B 3; B 2; B 1", 180 + 10 + 20.0),
        ("F_ck 1; F_none 2; F_all 3; B 3; F_ck 1; F_all 2; B 2; drop a 1; F_all 1; B 1", None),
        ("F_ck 1; F_none 2; F_all 3; B 3; F_ck 1; F_all 2; B 2; F_all 1; B 1", 180 + 10 + (20 - 1.0) + (10 - 0.5)),
    ],
)
def test_closing_replays_leave_their_tails_out(text: str, seconds: float | None) -> None:
    sequence = rotoff.Sequence.from_text(text.split("; "))
    if seconds is None:  # what the machine refuses is refused here too
        with pytest.raises(rotoff.InvalidSequenceError):
            expected_trace(CHAIN, sequence.ops, TAILS)
        return
    assert expected_trace(CHAIN, sequence.ops, TAILS).makespan == seconds
    machine = rotoff.simulate(CHAIN, sequence)
    assert expected_trace(CHAIN, sequence.ops) == machine
    assert expected_trace(CHAIN, sequence.ops, TAILS).peak_bytes == machine.peak_bytes


def test_a_copy_is_waited_for_before_a_shorter_replay() -> None:
    text = "F_ck 1; F_all 2; F_all 3; offload a 1; B 3; B 2; F_all 1; B 1"
    slow = replace(CHAIN, d2h_bandwidth=0.05)  # a copy of 200 s, which what drops the value waits for
    sequence = rotoff.Sequence.from_text(text.split("; "))
    assert (
        expected_trace(slow, sequence.ops, TAILS).makespan
        == rotoff.simulate(slow, sequence).makespan - 0.5
        == 60 + 200 + 29.5
    )


def test_tails_in_the_backward_keep_every_sum() -> None:
    forms = (rotoff.Form(20, 45.0),)
    chain = replace(CHAIN, stages=(CHAIN.stages[0], replace(CHAIN.stages[1], forms=forms), CHAIN.stages[2]))
    shifted = tails_in_backward(chain, TAILS)
    assert [(s.forward_time, s.backward_time) for s in shifted.stages] == [(9.5, 20.5), (19.0, 41.0), (30.0, 60.0)]
    assert shifted.stage(2).forms == (rotoff.Form(20, 46.0),)
    assert shifted.compute_time == chain.compute_time
    once = rotoff.Sequence.from_text(["F_ck 1", "F_ck 2", "F_all 3", "B 3", "F_all 2", "B 2", "F_all 1", "B 1"])
    assert rotoff.simulate(shifted, once).makespan == expected_trace(chain, once.ops, TAILS).makespan


def test_no_sequence_beats_the_bound_with_tails() -> None:
    limit = 110
    assert (
        least_time_of(CHAIN, limit) == least_time_of(CHAIN, limit, (0.0, 0.0, 0.0)) == rotoff.lower_bound(CHAIN, limit)
    )
    dear = (5.0, 12.0, 0.0)
    assert CHAIN.compute_time <= least_time_of(CHAIN, limit, dear) < rotoff.lower_bound(CHAIN, limit)
    best = min(
        expected_trace(CHAIN, rotoff.solve(chain, limit, mode, refine=0.02).ops, dear).makespan
        for mode in ("remat", "joint")
        for chain in (CHAIN, tails_in_backward(CHAIN, dear))
    )
    assert least_time_of(CHAIN, limit, dear) <= best


# -- how long they are


def test_an_estimate_counts_the_operations_behind() -> None:
    model, x = stack()
    flops = 1e9
    profile = estimate_profile(model, (x,), {}, count_only(flops))
    product = 2 * BATCH * WIDTH * WIDTH / (flops * 0.5)
    assert len(profile.chain) == 4
    assert profile.tail_times == pytest.approx((product, 0.0, product, 0.0))  # nobody replays the last for its output
    assert [s.forward_time for s in profile.chain.stages] == pytest.approx(
        [3 * product, product, 3 * product, 3 * product]
    )
    assert profile.chain.meta["tail_times"] == list(profile.tail_times)


class ProcessorTime(HostClock):
    """Of this thread alone: a busy machine interrupts the longer part of a forward more often than the tail."""

    def tick(self) -> None:
        self._times.append(time.thread_time())


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times that other work on this machine does not reach."""
    monkeypatch.setattr("rotoff.profile.timing.stage_timing.clock", lambda _: ProcessorTime())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("quiet")
def test_measured_it_is_the_last_product() -> None:
    model, x = stack()
    profile = rotoff.Checkpointable(model, forms=False).measure(x.repeat(16, 1), repeats=9).profile
    tails, stages = profile.tail_times, profile.chain.stages
    assert (tails[1], tails[3]) == (0.0, 0.0)
    for i in (0, 2):
        assert 0.2 * stages[i].forward_time < tails[i] < 0.5 * stages[i].forward_time
    assert profile.chain.meta["tail_times"] == list(tails)


@pytest.mark.usefixtures("quiet")
def test_a_stage_that_may_have_something_to_do_at_its_end_has_none() -> None:
    model, x = stack()
    model[0] = torch.compile(model[0], backend="eager")
    profile = rotoff.Checkpointable(model, forms=False).measure(x.repeat(16, 1), repeats=5).profile
    assert (profile.tail_times[0], profile.behaviours[0].enough) == (0.0, 0)
    assert profile.tail_times[2] > 0


def test_between_two_sizes_a_tail_is_on_the_line() -> None:
    chain = rotoff.Chain((rotoff.Stage(name="a", forward_time=1.0, backward_time=2.0),), 1.0, 1.0)
    low, high = (
        Profile(torch.device("cpu"), chain, (), (), (Behaviour(()),), 0, 0, tail_times=(tail,)) for tail in (0.25, 0.75)
    )
    assert between([high, low], [Share(0.5, 0.5)] * 2).tail_times == (0.5,)


# -- what plans make of them


def test_a_planned_step_is_expected_without_the_tails_of_its_closing_replays() -> None:
    model, x = stack()
    wrapped = rotoff.Checkpointable(model, forms=False).measure(x, repeats=1)
    tails = (0.25 * wrapped.chain.stage(1).forward_time, 0.0, 0.5 * wrapped.chain.stage(3).forward_time, 0.0)
    wrapped._latest.profile = replace(wrapped.profile, tail_times=tails)
    everything = wrapped.compute_sequence(wrapped.keep_all_memory).get_expected_makespan()
    assert everything == pytest.approx(wrapped.chain.compute_time)
    least = make_plan(wrapped.profile, Request(10**9, "remat", 50, {})).trace
    assert least.recompute_time == 0
    share = 0.6
    wrapped.compute_sequence(int(share * wrapped.keep_all_memory), mode="remat")
    machine = rotoff.simulate(wrapped.chain, wrapped.sequence)
    spared = sum(tails[wrapped.sequence.ops[n].stage - 1] for n in wrapped._latest.plan.closing)
    assert spared > 0
    plan = wrapped._latest.plan
    upkeep = wrapped.profile.upkeep.of(wrapped.sequence.ops)
    again = sum(more for more, event in zip(upkeep, plan.trace.events, strict=True) if event.recompute)
    assert wrapped.get_expected_makespan() == pytest.approx(machine.makespan - spared + sum(upkeep))
    assert plan.trace.recompute_time == pytest.approx(machine.recompute_time - spared + again)
    wrapped.close()


def test_a_stage_without_forms_is_planned_at_the_price_of_closing_replays() -> None:
    """Stage 1 twice and stage 2 once, or once more each: the tails decide."""
    model, x = stack()
    profile = estimate_profile(model, (x,), {}, count_only(1e9))
    bare = replace(
        profile, chain=replace(profile.chain, stages=tuple(replace(s, forms=()) for s in profile.chain.stages))
    )
    blind = replace(bare, tail_times=(0.0,) * 4)
    most = make_plan(bare, Request(10**12, "joint", 50, {})).trace.peak_bytes
    found = []
    for share in (0.5, 0.6, 0.7, 0.8):
        request = Request(int(share * most), "remat", 50, {"refine": 0.1})
        try:
            known, unknown = make_plan(bare, request), make_plan(blind, request)
        except rotoff.InfeasibleError:
            continue
        truth = expected_trace(bare.chain, unknown.sequence.ops, bare.tail_times).makespan
        assert known.trace.makespan <= truth * (1 + 1e-9)
        assert known.trace.makespan == expected_trace(bare.chain, known.sequence.ops, bare.tail_times).makespan
        found.append(known.trace.makespan < unknown.trace.makespan * (1 - 1e-6))
    assert any(found)


def test_joint_is_never_expected_to_be_slower_than_a_pure_mode() -> None:
    model, x = stack()
    profile = estimate_profile(model, (x,), {}, count_only(1e9))
    bare = replace(
        profile, chain=replace(profile.chain, stages=tuple(replace(s, forms=()) for s in profile.chain.stages))
    )
    most = make_plan(bare, Request(10**12, "joint", 50, {})).trace.peak_bytes
    for bandwidth in (1e6, 1e8):
        quick = {"refine": 0.05}
        slow = replace(bare, chain=replace(bare.chain, d2h_bandwidth=bandwidth, h2d_bandwidth=bandwidth))
        remat, offload, joint = (
            make_plan(slow, Request(int(0.7 * most), mode, 20, quick)).trace.makespan
            for mode in ("remat", "offload", "joint")
        )
        assert joint <= min(remat, offload) * (1 + 1e-9)


def test_the_form_that_stores_nothing_is_redone_as_a_whole() -> None:
    model, x = stack()
    profile = rotoff.Checkpointable(model, forms=lambda _: False).measure(x, repeats=1).profile
    recipe = profile.behaviours[0].forms[-1]
    assert (recipe.kept, recipe.whole) == (frozenset(), True)
    chain, L = profile.chain, len(profile.chain)
    k = len(chain.stage(1).forms)
    text = [f"F_sel 1 {k}", *(f"F_all {i}" for i in range(2, L + 1)), *(f"B {i}" for i in range(L, 0, -1))]
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    wrapped = with_sequence(
        rotoff.Checkpointable(model, forms=lambda _: False).measure(x, repeats=1), rotoff.Sequence.from_text(text)
    )
    wrapped(x).sum().backward()
    assert same([p.grad for p in model.parameters()], list(expected))
