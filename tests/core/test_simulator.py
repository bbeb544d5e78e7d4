"""The machine: bytes and times op by op as golden text, and one refusal for each rule.

The golden tables follow from the contract by hand. The chain's numbers sit in decimal places of their own, so that
every sum can be read: a_i is i0 bytes, ā_i is i00, gradients are thousands, transients of F_all ten thousands, of F_ck
and F_none hundred thousands, of B millions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import rotoff
from rotoff import Chain, Form, InvalidSequenceError, Machine, Sequence, Stage, Trace, parse, simulate
from rotoff.core.simulator import early_stops

STAGES = tuple(
    Stage(
        f"s{i}",
        forward_time=i,
        backward_time=10 * i,
        output_bytes=10 * i,
        saved_bytes=100 * i,
        grad_bytes=1000 * (i + 1),  # δ_1 is 2000, δ_2 3000, δ_3 4000
        forward_transient_bytes=10_000 * i,
        checkpoint_transient_bytes=100_000 * i,
        backward_transient_bytes=1_000_000 * i,
        forms=(Form(150, 25, 50_000, 5_000_000),) if i == 2 else (),
    )
    for i in (1, 2, 3)
)
CHAIN = Chain(STAGES, d2h_bandwidth=10, h2d_bandwidth=20, input_bytes=1, input_grad_bytes=1000)


def check(table: str, chain: Chain = CHAIN) -> Trace:
    """Run the ops of `table`; each of its lines is an op, its lane, start, end, device bytes and host bytes."""
    rows = [line.split() for line in table.strip().splitlines()]
    trace = simulate(chain, Sequence.from_text([" ".join(row[:-5]) for row in rows]))
    for row, event in zip(rows, trace.events, strict=True):
        seen = [event.lane, *(f"{x:g}" for x in (event.start, event.end)), str(event.memory), str(event.host_memory)]
        assert row == [*str(event.op).split(), *seen]
    return trace


# -- memory and time


def test_recompute_keeps_the_input_and_charges_the_gradient() -> None:
    """F_none drops its input (not a_0); δ counts from the making of a_L; B drops the input it holds as ``a``."""
    trace = check("""
        F_ck 1    compute   0   1    100011  0
        F_none 2  compute   1   3    200031  0
        F_all 3   compute   3   6     30321  0
        B 3       compute   6  36   3007321  0
        F_all 1   compute  36  37     13131  0
        F_all 2   compute  37  39     23331  0
        B 2       compute  39  59   2005331  0
        B 1       compute  59  69   1003131  0
    """)
    assert trace.recompute_time == 3
    assert [event.recompute for event in trace.events] == [False] * 4 + [True] * 2 + [False] * 2


def test_offload_and_prefetch() -> None:
    """free holds the compute lane until the copy out has ended; prefetch takes its bytes at once; B drops the host
    copy."""
    trace = check("""
        F_all 1          compute   0   1     10101    0
        offload abar 1   d2h       1  11       101  100
        F_all 2          compute   1   3     20301  100
        free abar 1      compute   3  11       301  100
        F_all 3          compute  11  14     30501  100
        prefetch abar 1  h2d      14  19      4601  100
        B 3              compute  14  44   3007601  100
        wait abar 1      compute  44  44      3331  100
        B 2              compute  44  64   2005331  100
        B 1              compute  64  74   1003131  100
    """)
    assert (trace.makespan, trace.idle_time, trace.host_peak_bytes) == (74, 8, 100)
    assert (trace.d2h_bytes, trace.h2d_bytes) == (100, 100)


def test_a_forward_without_transients_holds_what_it_makes() -> None:
    bare = Chain((Stage("", 1, 1, 10, 100),) * 2, 1, 1)
    trace = simulate(bare, Sequence.from_text(["F_ck 1", "F_all 2", "B 2", "F_all 1", "B 1"]))
    assert [event.memory for event in trace.events] == [10, 110, 130, 120, 120]


SLOW_OUT = replace(CHAIN, d2h_bandwidth=1)


def test_a_backward_that_drops_a_value_waits_for_its_copy() -> None:
    """The copy out of ā_1 lasts from 1 to 101; B 1 has computed by 66, but its memory is only free at 101."""
    trace = check(
        """
        F_all 1          compute   0    1     10101    0
        offload abar 1   d2h       1  101       101  100
        F_all 2          compute   1    3     20301  100
        F_all 3          compute   3    6     30601  100
        B 3              compute   6   36   3007601  100
        B 2              compute  36   56   2005331  100
        B 1              compute  56   66   1003131  100
        """,
        SLOW_OUT,
    )
    assert trace.makespan == 101
    assert trace.idle_time == 35


# -- the limit

KEEP_ALL = "F_all 1\nF_all 2\nF_all 3\nB 3\nB 2\nB 1"


def test_a_limit_may_be_reached_but_not_exceeded() -> None:
    sequence = Sequence.from_text(KEEP_ALL)
    assert simulate(CHAIN, sequence, 3007601).peak_bytes == 3007601
    assert simulate(CHAIN, sequence, "4 MB").peak_bytes == 3007601
    with pytest.raises(InvalidSequenceError) as caught:
        simulate(CHAIN, sequence, 3007600)
    assert (caught.value.op, caught.value.index) == (parse("B 3"), 3)
    sentence = "op 3 (B 3): holds 3007601 bytes (2.87 MiB), 1 more than the limit of 3007600 (2.87 MiB)"
    assert str(caught.value) == sentence


# -- what is not legal

OFFLOADED_1 = "F_all 1; offload abar 1; F_all 2; free abar 1"
FORWARD = "F_all 1; F_all 2; F_all 3"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        # stages that are not there
        ("F_all 0", "the chain has stages 1 to 3"),
        ("F_all 1; offload a 4", "the chain has stages 1 to 3"),
        ("offload abar 0", "the chain has stages 1 to 3"),
        # inputs that are not there
        ("F_all 2", "needs a 1 or abar 1, which the device does not hold"),
        ("F_all 1; F_none 2", "needs a 1, which the device does not hold"),
        ("F_ck 1; drop a 1; F_all 2", "needs a 1 or abar 1, which the device does not hold"),
        ("F_ck 1; offload a 1; free a 1; F_all 2", "which is on the host; prefetch it and wait for it first"),
        ("F_ck 1; offload a 1; free a 1; prefetch a 1; F_all 2", "which is still arriving; wait for it first"),
        # what is held already
        ("F_all 1; F_all 1", "makes abar 1, but the device holds abar 1 already"),
        ("F_ck 1; F_ck 1", "makes a 1, but the device holds a 1 already"),
        ("F_all 1; F_ck 1", "makes a 1, but the device holds abar 1 already"),
        (f"{OFFLOADED_1}; F_all 1", "makes abar 1, which is on the host; prefetch it instead"),
        (f"{OFFLOADED_1}; prefetch abar 1; F_all 1", "makes abar 1, but the device holds abar 1 already"),
        # forms that are not there
        ("F_sel 1 1", "stage 1 has 0 smaller forms"),
        ("F_all 1; F_sel 2 2", "stage 2 has 1 smaller forms"),
        # backward out of order, or without what it needs
        ("B 3", "needs abar 3, which the device does not hold"),
        (f"{FORWARD}; B 2", "the next backward is B 3"),
        (f"{FORWARD}; B 3; B 3", "the next backward is B 2"),
        ("F_ck 1; F_ck 2; F_ck 3; B 3", "needs abar 3, which the device does not hold"),
        ("F_ck 1; F_ck 2; F_all 3; drop a 2; B 3", "needs the input of stage 3, which the device does not hold"),
        (f"{OFFLOADED_1}; F_all 3; B 3; B 2", "needs the input of stage 2, which the device does not hold"),
        (f"{OFFLOADED_1}; F_all 3; B 3; prefetch abar 1; B 2", "needs the input of stage 2"),
        (f"{FORWARD}; offload abar 2; free abar 2; B 3", "needs the input of stage 3"),
        (f"{FORWARD}; B 3; B 2; drop abar 1; B 1", "needs abar 1, which the device does not hold"),
        (f"{FORWARD}; B 3; B 2; B 1; F_all 1", "nothing may follow B 1"),
        (f"{FORWARD}; B 3; B 2; B 1; B 1", "nothing may follow B 1"),
        # the caller's values
        ("offload a 0", "a 0 is never moved or dropped"),
        ("drop a 0", "a 0 is never moved or dropped"),
        ("F_ck 1; F_ck 2; F_ck 3; offload a 3", "a 3 is never moved or dropped"),
        (f"{FORWARD}; offload abar 3", "abar 3 is never moved or dropped"),
        ("F_ck 1; F_ck 2; F_ck 3; F_none 3", "makes a 3, but the device holds a 3 already"),
        # moves
        ("offload abar 1", "needs abar 1, which the device does not hold"),
        ("F_all 1; offload a 1", "needs a 1, which the device does not hold"),
        ("F_all 1; offload abar 1; offload abar 1", "abar 1 is on the host already"),
        (f"{OFFLOADED_1}; prefetch abar 1; wait abar 1; offload abar 1", "abar 1 is on the host already"),
        ("F_all 1; free abar 1", "abar 1 is not on the host; offload it first, or drop it"),
        (f"{OFFLOADED_1}; free abar 1", "needs abar 1, which is on the host; prefetch it and wait for it first"),
        (f"{OFFLOADED_1}; prefetch abar 1; free abar 1", "needs abar 1, which is still arriving; wait for it first"),
        (f"{OFFLOADED_1}; drop abar 1", "needs abar 1, which is on the host; prefetch it and wait for it first"),
        ("F_all 1; prefetch abar 1", "abar 1 is on the device already"),
        ("prefetch abar 1", "abar 1 is not on the host; offload it first"),
        ("F_all 1; wait abar 1", "abar 1 is not arriving; prefetch it first"),
        (f"{OFFLOADED_1}; wait abar 1", "abar 1 is not arriving; prefetch it first"),
        (f"{OFFLOADED_1}; prefetch abar 1; wait abar 1; wait abar 1", "abar 1 is not arriving; prefetch it first"),
        (f"{FORWARD}; offload abar 2; B 3; B 2; prefetch abar 2", "abar 2 is not on the host; offload it first"),
    ],
)
def test_the_last_op_of_these_is_refused(text: str, sentence: str) -> None:
    sequence = Sequence.from_text(text.split("; "))
    with pytest.raises(InvalidSequenceError) as caught:
        simulate(CHAIN, sequence)
    last = len(sequence) - 1
    assert (caught.value.op, caught.value.index) == (sequence[last], last)
    assert str(caught.value).startswith(f"op {last} ({sequence[last]}): ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the sequence ends before B 3"),
        (FORWARD, "the sequence ends before B 3"),
        (f"{FORWARD}; B 3; B 2", "the sequence ends before B 1"),
        (f"{FORWARD}; B 3; B 2; F_ck 2; B 1", "a 2 is left at the end"),
        (f"{FORWARD}; B 3; B 2; F_all 2; B 1", "abar 2 is left at the end"),
        (f"{FORWARD}; B 3; B 2; F_ck 2; offload a 2; free a 2; B 1", "a 2 is left at the end"),
    ],
)
def test_a_sequence_must_end_with_nothing_left(text: str, sentence: str) -> None:
    with pytest.raises(InvalidSequenceError, match=sentence) as caught:
        simulate(CHAIN, Sequence.from_text(text.split("; ") if text else []))
    assert caught.value.op is None
    assert caught.value.index is None


@pytest.mark.parametrize(
    ("done", "refused"),
    [
        ("F_all 1; F_all 2", "F_all 3"),
        ("F_all 1", "F_ck 2"),
        ("F_ck 1", "F_none 2"),
        ("F_all 1; F_all 2; F_all 3", "B 3"),
        ("F_all 1; offload abar 1; F_ck 2; free abar 1; F_all 3; B 3", "prefetch abar 1"),
    ],
)
def test_an_op_over_the_limit_changes_nothing_and_runs_once_the_limit_allows_it(done: str, refused: str) -> None:
    machine, free = Machine(CHAIN), Machine(CHAIN)
    for text in done.split("; "):
        machine.step(parse(text))
        free.step(parse(text))
    machine.mem_limit = free.step(parse(refused)).memory - 1
    with pytest.raises(InvalidSequenceError, match="1 more than the limit"):
        machine.step(parse(refused))
    machine.mem_limit = None
    assert machine.step(parse(refused)) == free.events[-1]
    state = [(m.device, m.host, m.arriving, m.held_bytes, m.next_backward, m.backward_phase) for m in (machine, free)]
    assert state[0] == state[1]


# -- what a replay right before its own backward leaves out


TAILS = (0.5, 1.0, 0.0)
SMALLER = (rotoff.Form(20, 45.0),)  # of stage 2


def with_tails(*tails: float) -> rotoff.Chain:
    stages = [rotoff.Stage(str(i), 10.0 * i, 20.0 * i, 10, 50, tail_time=tail) for i, tail in enumerate(tails, 1)]
    stages[1] = replace(stages[1], forms=SMALLER)
    return rotoff.Chain(tuple(stages), 1.0, 1.0)


TAILED = with_tails(*TAILS)


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
    assert rotoff.simulate(TAILED, sequence).makespan == seconds
    whole = replace(TAILED, stages=tuple(replace(stage, tail_time=0.0) for stage in TAILED.stages))
    assert rotoff.simulate(whole, sequence).makespan == seconds + sum(TAILS[sequence[n].stage - 1] for n in early)
    assert rotoff.simulate(whole, sequence).peak_bytes == rotoff.simulate(TAILED, sequence).peak_bytes


def test_device_update_before_backward_prevents_early_stop() -> None:
    text = ["F_ck 1", "F_ck 2", "F_all 3", "B 3", "F_all 2", "{update}", "B 2", "F_all 1", "B 1"]
    found = {
        update: early_stops(rotoff.Sequence.from_text([op.format(update=update) for op in text], resident=[]))
        for update in ("U 1", "H 1")
    }
    assert found == {"U 1": {7}, "H 1": {4, 7}}


def test_early_stopping_replay_waits_for_its_copy() -> None:
    text = "F_ck 1; F_all 2; F_all 3; offload a 1; B 3; B 2; F_all 1; B 1"
    slow = replace(TAILED, d2h_bandwidth=0.05)  # a copy of 200 s, which what drops the value waits for
    assert rotoff.simulate(slow, rotoff.Sequence.from_text(text.split("; "))).makespan == 60 + 200 + 29.5


def test_tail_time_is_validated_and_written_if_nonzero() -> None:
    with pytest.raises(rotoff.ChainError, match=r"tail_time of stage 'a' is 2.0, more than its forward_time of 1.0"):
        rotoff.Stage("a", 1.0, 1.0, tail_time=2.0)
    told = TAILED.to_dict()
    assert [stage.get("tail_time") for stage in told["stages"]] == [0.5, 1.0, None]
    assert rotoff.Chain.from_dict(told) == TAILED
