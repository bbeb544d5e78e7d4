"""What a replay right before its own backward leaves out: how long that is, and what steps and plans make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rotoff
from rotoff.core.simulator import early_stops

TAILS = (0.5, 1.0, 0.0)
FORMS = (rotoff.Form(20, 45.0),)  # of stage 2


def with_tails(*tails: float) -> rotoff.Chain:
    stages = [rotoff.Stage(str(i), 10.0 * i, 20.0 * i, 10, 50, tail_time=tail) for i, tail in enumerate(tails, 1)]
    stages[1] = replace(stages[1], forms=FORMS)
    return rotoff.Chain(tuple(stages), 1.0, 1.0)


CHAIN = with_tails(*TAILS)


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
