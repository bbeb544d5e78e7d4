"""Replays are put for forms where the expected step gets shorter, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from models import fresh, plain, same, train

import rotoff
from rotoff.core.sequence import Op, OpKind, parse
from rotoff.planning.memory_account import simulated_bytes
from rotoff.planning.planner import least_limit, make_plan, plan_everything
from rotoff.planning.request import Request
from rotoff.profile.profile import Profile
from rotoff.runtime.early_stop import expected_trace
from rotoff.runtime.form_replays import replay_forms

FORMS = (rotoff.Form(saved_bytes=6, backward_time=2.4), rotoff.Form(saved_bytes=2, backward_time=2.9))
STAGE = rotoff.Stage(name="a", forward_time=1.0, backward_time=2.0, output_bytes=2, saved_bytes=10, forms=FORMS)
LAST = rotoff.Stage(name="z", forward_time=1.0, backward_time=2.0, output_bytes=2, saved_bytes=2)
CHAIN = rotoff.Chain((STAGE, STAGE, STAGE, LAST), 1.0, 1.0, input_bytes=2)
TAILS = (0.2, 0.2, 0.2, 0.0)  # so a replay takes 0.8, which is between the two forms


def ops(text: str) -> tuple[Op, ...]:
    return tuple(parse(line.strip()) for line in text.split(","))


def exchanged(text: str, limit: int | None = None, tails: tuple[float, ...] = TAILS) -> list[str]:
    def expected(operations: Sequence[Op]) -> float:
        return expected_trace(CHAIN, operations, tails, limit).makespan

    return [str(op) for op in replay_forms(ops(text), expected)]


def test_the_dear_form_is_replayed_and_the_cheap_one_stays() -> None:
    found = exchanged("F_sel 1 2, F_sel 2 1, F_sel 3 2, F_all 4, B 4, B 3, B 2, B 1")
    assert found == [str(op) for op in ops("F_ck 1, F_sel 2 1, F_ck 3, F_all 4, B 4, F_all 3, B 3, B 2, F_all 1, B 1")]


def test_without_tails_nothing_is_exchanged() -> None:
    text = "F_sel 1 2, F_sel 2 2, F_sel 3 2, F_all 4, B 4, B 3, B 2, B 1"
    assert exchanged(text, tails=(0.0,) * 4) == [str(op) for op in ops(text)]


def test_it_stays_within_the_limit() -> None:
    text = "F_sel 1 2, F_sel 2 2, F_sel 3 2, F_all 4, B 4, B 3, B 2, B 1"
    replayed = exchanged(text)
    assert replayed.count("F_all 3") == 1
    form, replay = (rotoff.simulate(CHAIN, rotoff.Sequence(ops(t))).peak_bytes for t in (text, ", ".join(replayed)))
    assert form < replay
    assert exchanged(text, replay) == replayed
    some = exchanged(text, replay - 1)
    assert rotoff.simulate(CHAIN, rotoff.Sequence(ops(", ".join(some)))).peak_bytes < replay
    assert exchanged(text, form) == [str(op) for op in ops(text)]


@pytest.mark.parametrize(
    "text",
    [
        "F_sel 1 2, F_ck 2, offload abar 1, free abar 1, F_all 3, F_all 4, B 4, B 3, prefetch abar 1, wait abar 1,"
        " F_all 2, B 2, B 1",
        "F_sel 1 2, drop abar 1, F_sel 1 2, F_all 2, F_all 3, F_all 4, B 4, B 3, B 2, B 1",
    ],
)
def test_what_leaves_or_is_made_twice_stays_a_form(text: str) -> None:
    assert exchanged(text) == [str(op) for op in ops(text)]


def between(profile: Profile, mode: str) -> range:
    """Limits from the smallest for `mode` to nearly all that the model takes."""
    least, most = (
        least_limit(profile, Request(1 << 40, mode, 50, {})),
        simulated_bytes(profile, plan_everything(profile)),
    )
    return range(least, most, (most - least) // 5)


def test_plans_are_expected_to_be_faster_with_it_and_give_the_plain_models_bits() -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch(), repeats=1)
    rows = [replace(stage, forward_time=1.0, backward_time=2.0) for stage in wrapped.chain.stages]
    stages = tuple(replace(s, forms=tuple(replace(f, backward_time=2.9) for f in s.forms)) for s in rows)
    tails = (0.5,) * (len(stages) - 1) + (0.0,)
    profile = replace(wrapped.profile, chain=replace(wrapped.chain, stages=stages), tail_times=tails, compact=None)
    wrapped._latest.profile = profile
    exchanged = 0
    for limit in between(profile, "remat"):
        plan = make_plan(profile, Request(limit, "remat", 50, {}))
        blind = make_plan(replace(profile, tail_times=(0.0,) * len(stages)), Request(limit, "remat", 50, {}))
        known = expected_trace(profile.chain, blind.sequence.ops, tails).makespan
        assert plan.trace.makespan <= known + sum(profile.upkeep.of(plan.sequence.ops))
        if len(plan.closing) > len(blind.closing):
            exchanged += 1
            again, batch = fresh("residual")
            wrapped.load_state_dict(again.state_dict())
            wrapped.zero_grad()
            wrapped.compute_sequence(limit, mode="remat")
            assert wrapped.sequence.ops == plan.sequence.ops
            assert same(train(wrapped, batch), plain("residual"))
    assert exchanged
    wrapped.close()


def test_offload_alone_runs_no_stage_twice() -> None:
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model).measure(batch(), repeats=1)
    profile = replace(wrapped.profile, tail_times=tuple(stage.forward_time for stage in wrapped.chain.stages))
    for limit in between(profile, "offload"):
        plan = make_plan(profile, Request(limit, "offload", 50, {}))
        assert not plan.closing
        assert sum(op.kind in (OpKind.F_ALL, OpKind.F_SEL, OpKind.F_CK, OpKind.F_NONE) for op in plan.sequence) == len(
            wrapped.chain
        )
    wrapped.close()
