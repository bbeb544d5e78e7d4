"""What a replay right before its own backward leaves out: how long that is, and what steps and plans make of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from models import same
from planned_steps import with_sequence
from torch import nn

import rotoff
from rotoff.core.simulator import early_stops
from rotoff.profile.between_sizes import Share, between
from rotoff.profile.estimate.devices import Device
from rotoff.profile.profile import Profile
from rotoff.profile.timing.stage_timing import Clock
from rotoff.tensors.stage import Behaviour

TAILS = (0.5, 1.0, 0.0)
FORMS = (rotoff.Form(20, 45.0),)  # of stage 2


def with_tails(*tails: float) -> rotoff.Chain:
    stages = [rotoff.Stage(str(i), 10.0 * i, 20.0 * i, 10, 50, tail_time=tail) for i, tail in enumerate(tails, 1)]
    stages[1] = replace(stages[1], forms=FORMS)
    return rotoff.Chain(tuple(stages), 1.0, 1.0)


CHAIN = with_tails(*TAILS)
BATCH, WIDTH = 128, 192


def tails(chain: rotoff.Chain) -> list[float]:
    return [stage.tail_time for stage in chain.stages]


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


# -- what the machine says of them


@pytest.mark.parametrize(
    ("text", "early", "seconds"),
    [
        # 180 s in all, and each forward that runs again: those right before their own backward by their tails less
        ("F_all 1; F_all 2; F_all 3; B 3; B 2; B 1", [], 180.0),
        ("F_ck 1; F_ck 2; F_all 3; B 3; F_all 2; B 2; F_all 1; B 1", [4, 6], 180 + (20 - 1.0) + (10 - 0.5)),
        ("F_ck 1; F_none 2; F_all 3; B 3; F_all 1; F_all 2; B 2; B 1", [5], 180 + 10 + (20 - 1.0)),
        ("F_ck 1; F_none 2; F_all 3; F_all 1; F_all 2; B 3; B 2; B 1", [], 180 + 10 + 20.0),
        ("F_ck 1; F_none 2; F_all 3; B 3; F_ck 1; F_all 2; B 2; F_all 1; B 1", [5, 7], 180 + 10 + 19 + 9.5),
        ("F_ck 1; F_ck 2; F_all 3; B 3; F_sel 2 1; B 2; F_all 1; B 1", [4, 6], 180 + 5 + (20 - 1.0) + (10 - 0.5)),
        # moves are not on the compute lane
        ("F_ck 1; F_ck 2; offload a 1; F_all 3; B 3; F_all 2; free a 1; prefetch a 1; wait a 1; B 2; F_all 1; B 1",
         [5, 10], 180 + 10 + (20 - 1.0) + (10 - 0.5)),  # ten seconds for the way back
    ],
)  # fmt: skip
def test_replay_before_its_backward_leaves_out_tail(text: str, early: list[int], seconds: float) -> None:
    sequence = rotoff.Sequence.from_text(text.split("; "))
    assert sorted(early_stops(sequence)) == early
    assert rotoff.simulate(CHAIN, sequence).makespan == seconds
    whole = replace(CHAIN, stages=tuple(replace(stage, tail_time=0.0) for stage in CHAIN.stages))
    assert rotoff.simulate(whole, sequence).makespan == seconds + sum(TAILS[sequence[n].stage - 1] for n in early)
    assert rotoff.simulate(whole, sequence).peak_bytes == rotoff.simulate(CHAIN, sequence).peak_bytes


def test_device_update_before_backward_prevents_early_stop() -> None:
    text = ["F_ck 1", "F_ck 2", "F_all 3", "B 3", "F_all 2", "{update}", "B 2", "F_all 1", "B 1"]
    found = {
        update: early_stops(rotoff.Sequence.from_text([op.format(update=update) for op in text], resident=[]))
        for update in ("U 1", "H 1")
    }
    assert found == {"U 1": {7}, "H 1": {4, 7}}


def test_early_stopping_replay_waits_for_its_copy() -> None:
    text = "F_ck 1; F_all 2; F_all 3; offload a 1; B 3; B 2; F_all 1; B 1"
    slow = replace(CHAIN, d2h_bandwidth=0.05)  # a copy of 200 s, which what drops the value waits for
    assert rotoff.simulate(slow, rotoff.Sequence.from_text(text.split("; "))).makespan == 60 + 200 + 29.5


def test_tail_time_is_validated_and_written_if_nonzero() -> None:
    with pytest.raises(rotoff.ChainError, match=r"tail_time of stage 'a' is 2.0, more than its forward_time of 1.0"):
        rotoff.Stage("a", 1.0, 1.0, tail_time=2.0)
    told = CHAIN.to_dict()
    assert [stage.get("tail_time") for stage in told["stages"]] == [0.5, 1.0, None]
    assert rotoff.Chain.from_dict(told) == CHAIN


def test_no_sequence_beats_the_bound_with_tails() -> None:
    limit = 90  # at 110 both bounds are 185, the time with the smaller form
    dear = with_tails(5.0, 12.0, 0.0)
    assert CHAIN.compute_time <= rotoff.lower_bound(dear, limit) < rotoff.lower_bound(with_tails(0.0, 0.0, 0.0), limit)
    for mode in ("remat", "joint"):
        assert rotoff.lower_bound(dear, limit) <= rotoff.simulate(dear, rotoff.solve(dear, limit, mode)).makespan


# -- how long they are


def test_estimated_forwards_count_their_operations() -> None:
    model, x = stack()
    flops = 1e9
    chain = rotoff.estimate(model, x, device=count_only(flops))
    product = 2 * BATCH * WIDTH * WIDTH / (flops * 0.5)
    assert len(chain) == 4
    assert [s.forward_time for s in chain.stages] == pytest.approx(
        [3 * product, product, 3 * product, 3 * product], rel=0.01
    )


class ProcessorTime(Clock):
    """Of this thread alone: a busy machine interrupts the longer part of a forward more often than the tail."""

    def tick(self) -> None:
        self._marks.append(time.thread_time())


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times that other work on this machine does not reach."""
    monkeypatch.setattr("rotoff.profile.timing.stage_timing.Clock", ProcessorTime)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("quiet")
def test_measured_tail_is_the_last_product() -> None:
    model, x = stack()
    profile = rotoff.Checkpointable(model, forms=False).measure(x.repeat(16, 1), repeats=9).profile
    first, second, third, fourth = profile.chain.stages
    assert (second.tail_time, fourth.tail_time) == (0.0, 0.0)
    for stage in (first, third):
        assert 0.2 * stage.forward_time < stage.tail_time < 0.5 * stage.forward_time


@pytest.mark.usefixtures("quiet")
def test_stage_with_work_at_its_end_has_no_tail() -> None:
    model, x = stack()
    model[0] = torch.compile(model[0], backend="eager")
    profile = rotoff.Checkpointable(model, forms=False).measure(x.repeat(16, 1), repeats=5).profile
    assert (profile.chain.stage(1).tail_time, profile.behaviours[0].early_stop) == (0.0, 0)
    assert profile.chain.stage(3).tail_time > 0


def test_tail_is_interpolated_between_sizes() -> None:
    low, high = (
        Profile(
            torch.device("cpu"),
            rotoff.Chain((rotoff.Stage("a", 1.0, 2.0, tail_time=tail),), 1.0, 1.0),
            (), (), (Behaviour(()),), 0, 0,
        )
        for tail in (0.25, 0.75)
    )  # fmt: skip
    assert tails(between([high, low], [Share(0.5, 0.5)] * 2).chain) == [0.5]


# -- what plans make of them


def bare_chain() -> rotoff.Chain:
    """Of a model whose stages have no smaller forms."""
    model, x = stack()
    chain = rotoff.estimate(rotoff.Checkpointable(model, forms=False), x, device=count_only(1e9))
    third = [0.0 if stage.forward_time < chain.stages[0].forward_time / 2 else 1 / 3 for stage in chain.stages]
    rows = zip(chain.stages, third, strict=True)
    return replace(chain, stages=tuple(replace(stage, tail_time=part * stage.forward_time) for stage, part in rows))


def test_plan_prices_early_stop() -> None:
    """Stage 1 twice and stage 2 once, or once more each: the tails decide."""
    bare = bare_chain()
    blind = replace(bare, stages=tuple(replace(stage, tail_time=0.0) for stage in bare.stages))
    most = rotoff.simulate(bare, rotoff.keep_all(bare)).peak_bytes
    found = []
    for share in (0.5, 0.6, 0.7, 0.8):
        try:
            known, unknown = (rotoff.solve(one, int(share * most), mode="remat", refine=0.1) for one in (bare, blind))
        except rotoff.InfeasibleError:
            continue
        seconds, truth = (rotoff.simulate(bare, one).makespan for one in (known, unknown))
        assert seconds <= truth * (1 + 1e-9)
        found.append(seconds < truth * (1 - 1e-6))
    assert found


def test_early_stop_works_with_forms_and_offload() -> None:
    model, x = stack()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for again in (["F_sel 3 1"], ["F_all 3", "offload abar 3", "free abar 3", "prefetch abar 3", "wait abar 3"]):
        text = ["F_all 1", "F_all 2", "F_ck 3", "F_all 4", "B 4", *again, "B 3", "B 2", "B 1"]
        wrapped = rotoff.Checkpointable(model, forms=lambda _: False).measure(x, repeats=1)
        wrapped = with_sequence(wrapped, rotoff.Sequence.from_text(text))
        assert sorted(wrapped._latest.plan.early) == [5]
        model.zero_grad()
        wrapped(x).sum().backward()
        assert same([p.grad for p in model.parameters()], list(expected))
        wrapped.close()


def test_joint_is_never_slower_than_other_modes() -> None:
    bare = bare_chain()
    limit = int(0.7 * rotoff.simulate(bare, rotoff.keep_all(bare)).peak_bytes)
    for bandwidth in (1e6, 1e8):
        slow = replace(bare, d2h_bandwidth=bandwidth, h2d_bandwidth=bandwidth)
        remat, offload, joint = (
            rotoff.simulate(slow, rotoff.solve(slow, limit, mode=mode, mem_slots=20, refine=0.05)).makespan
            for mode in ("remat", "offload", "joint")
        )
        assert joint <= min(remat, offload) * (1 + 1e-9)


def test_form_that_stores_nothing_redoes_all() -> None:
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
