"""Parameters in the machine: golden sequences as text, what is resident between steps, and one refusal for each rule.

The tables follow from the contract by hand. a_i are ten thousands of bytes, ā_i hundred thousands, δ_i millions,
parameters below a thousand; copies out run at 10 bytes a second, copies in at 20.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from oracles.chains import chains, groups
from thoroughness import examples

import rotoff
from rotoff import (
    Chain,
    ChainError,
    InvalidSequenceError,
    ParameterGroup,
    Sequence,
    Stage,
    Trace,
    simulate,
)
from rotoff.core.parameters import in_parts

STAGES = (Stage("s1", 1, 2, 10_000, 100_000, 1_000_000), Stage("s2", 2, 4, 20_000, 200_000, 2_000_000))
GROUPS = (ParameterGroup((1,), 40, 40, 80, 3, 5, 7), ParameterGroup((2,), 20, 20, 40, 1, 2, 5))
CHAIN = Chain(STAGES, d2h_bandwidth=10, h2d_bandwidth=20, parameters=GROUPS)
TIED = replace(CHAIN, parameters=(ParameterGroup((2, 1), 40, 40, 80, 3, None, 7), ParameterGroup((1,), 20)))


def check(table: str, resident: list[str], makespan: float, chain: Chain = CHAIN) -> Trace:
    """Run the ops of `table`; each of its lines is an op, its lane, start, end, device bytes and host bytes."""
    rows = [line.split() for line in table.strip().splitlines()]
    sequence = Sequence.from_text([" ".join(row[:-5]) for row in rows], resident=resident)
    trace = simulate(chain, sequence)
    for row, event in zip(rows, trace.events, strict=True):
        seen = [event.lane, *(f"{x:g}" for x in (event.start, event.end)), str(event.memory), str(event.host_memory)]
        assert row == [*str(event.op).split(), *seen]
    assert trace.makespan == makespan
    return trace


# -- memory and time


def test_all_resident() -> None:
    """The first B of a group takes the gradient's bytes, U gives them back, and holds its transient bytes while it
    runs."""
    trace = check(
        """
        F_all 1        compute    0    1    100180    0
        F_all 2        compute    1    3    300180    0
        B 2            compute    3    7   3300200    0
        U 2            compute    7    8   1120205    0
        B 1            compute    8   10   1120220    0
        U 1            compute   10   13     20227    0
        """,
        ["w 1", "o 1", "w 2", "o 2"],
        13,
    )
    assert (trace.idle_time, trace.host_peak_bytes) == (0, 0)
    assert [event.parameter_memory for event in trace.events] == [180, 180, 200, 200, 220, 220]


def test_what_is_in_flight_between_steps() -> None:
    """Both groups are updated by the host at the end of the step and arrive during the next: a steady step takes 20 s,
    the first 13."""
    trace = check(
        """
        wait w 1       compute    0    7        60  180
        F_all 1        compute    7    8    100060  180
        wait w 2       compute    8    8    100060  180
        F_all 2        compute    8   10    300060  180
        B 2            compute   10   14   3300080  180
        drop w 2       compute   14   14   1120080  180
        offload g 2    d2h       14   16   1120060  200
        B 1            compute   14   16   1120100  200
        drop w 1       compute   16   16     20100  200
        offload g 1    d2h       16   20     20060  240
        H 1            host      20   25     20060  240
        prefetch w 1   h2d       25   27     20100  200
        free g 2       compute   16   16     20100  200
        H 2            host      25   27     20080  200
        prefetch w 2   h2d       27   28     20100  180
        free g 1       compute   16   20     20100  180
        """,
        ["w 1", "w 2"],
        20,
    )
    assert max(event.end for event in trace.events) == 28, "what ends in the next step is shown where it ends"


@given(chains(most=5).flatmap(groups))
@examples(40)
def test_keeping_everything_is_legal_and_costs_the_updates_alone(chain: Chain) -> None:
    trace = simulate(chain, rotoff.keep_all(chain))
    updates = sum(group.update_time for group in chain.parameters if group.grad_bytes)
    assert trace.makespan == pytest.approx(chain.compute_time + updates)
    assert trace.host_peak_bytes == trace.d2h_bytes == trace.h2d_bytes == 0


# -- between steps


def test_of_a_frozen_resident_group_the_host_has_a_copy_where_the_step_drops_it() -> None:
    frozen = replace(CHAIN, parameters=(ParameterGroup((1,), 40), ParameterGroup((2,), 20)))
    gone = "F_all 1; drop w 1; F_all 2; B 2; prefetch w 1; wait w 1; B 1"
    trace = simulate(frozen, Sequence.from_text(gone.split("; "), resident=["w 1", "w 2"]))
    assert trace.host_peak_bytes == 40
    stays = "F_all 1; F_all 2; B 2; B 1"
    assert simulate(frozen, Sequence.from_text(stays.split("; "), resident=["w 1", "w 2"])).host_peak_bytes == 0
    with pytest.raises(InvalidSequenceError, match=r"op 1 \(offload w 1\): w 1 is on the host already"):
        simulate(frozen, Sequence.from_text(["F_all 1", "offload w 1", "drop w 1"], resident=["w 1", "w 2"]))


def test_a_value_of_no_bytes_is_always_there_and_never_named() -> None:
    stateless = replace(CHAIN, parameters=(ParameterGroup((1,), 40, 40, 0, 3, 5),))
    simulate(stateless, Sequence.from_text(["F_all 1", "F_all 2", "B 2", "B 1", "U 1"], resident=["w 1"]))
    simulate(stateless, Sequence.from_text(HOST.split("; "), resident=["w 1"]))
    with pytest.raises(InvalidSequenceError, match="o 1 has 0 bytes, so it is always usable and never named"):
        simulate(stateless, Sequence.from_text(["F_all 1"], resident=["w 1", "o 1"]))
    with pytest.raises(InvalidSequenceError, match=r"op 1 \(prefetch o 1\): o 1 has 0 bytes"):
        simulate(stateless, Sequence.from_text(["F_all 1", "prefetch o 1"], resident=["w 1"]))


# -- what is refused

HOST = "F_all 1; F_all 2; B 2; B 1; offload g 1; drop w 1; H 1; prefetch w 1; free g 1; wait w 1"
ALL = ["w 1", "o 1", "w 2", "o 2"]
DONE = "F_all 1; F_all 2; B 2; U 2; B 1"


@pytest.mark.parametrize(
    ("text", "resident", "sentence"),
    [
        ("F_all 1", [], r"op 0 \(F_all 1\): needs w 1, which is on the host; prefetch it and wait for it first"),
        ("prefetch w 1; F_ck 1", [], r"op 1 \(F_ck 1\): needs w 1, which is still arriving; wait for it first"),
        ("F_all 1; drop w 1; F_all 2; B 2; drop w 2; B 1; U 2; U 1", ALL, "w 1 has no valid copy on the host; offload it"),
        ("F_all 1; offload w 1; free w 1; F_all 2; B 2; B 1; U 1", ALL, r"op 5 \(B 1\): needs w 1, which is on the host"),
        ("F_all 1; free w 1", ALL, "w 1 is not on the host; offload it first$"),
        ("F_all 1; F_all 2; U 2", ALL, "g 2 is not whole; it is once B 2 has run"),
        ("F_all 1; F_all 2; offload g 2", ALL, "needs g 2, which the device does not hold"),
        ("F_all 1; F_all 2; B 2; drop g 2", ALL, "g 2 is never dropped; update its group, or offload and free it"),
        ("F_all 1; F_all 2; B 2; free g 2", ALL, "g 2 is not on the host; offload it first"),
        ("F_all 1; F_all 2; B 2; offload g 2; offload g 2", ALL, "g 2 is on the host already"),
        ("F_all 1; F_all 2; B 2; offload g 2; free g 2; U 2", ALL, "needs g 2, which is on the host; prefetch it"),
        ("F_all 1; F_all 2; B 2; U 2", ["w 1", "w 2"], "needs o 2, which is on the host; prefetch it"),
        ("F_all 1; F_all 2; B 2; H 2", ["w 1", "w 2"], "needs g 2 on the host; offload it first"),
        ("F_all 1; F_all 2; B 2; offload g 2; H 2", ["w 1", "w 2"], "needs w 2 on the host alone; free or drop the device's copy"),
        ("F_all 1; F_all 2; B 2; offload g 2; H 2", ALL, "needs w 2 on the host alone"),
        ("F_all 1; F_all 2; B 2; drop w 2; offload g 2; H 2", ["w 1", "w 2", "o 2"], "needs o 2 on the host alone"),
        ("F_all 1; F_all 2; B 2; U 2; U 2", ALL, "group 2 is updated already; each group is updated once in a step"),
        ("F_all 1; U 3", ALL, r"op 1 \(U 3\): the chain has parameter groups 1 to 2"),
        ("F_all 1; prefetch w 0", ALL, "the chain has parameter groups 1 to 2"),
        (f"{DONE}; U 1; F_all 1", ALL, "nothing may follow B 1 but updates and moves of parameters"),
        (f"{DONE}; drop a 1", ALL, "nothing may follow B 1 but updates and moves of parameters"),
        (DONE, ALL, "g 1 is left at the end; update its group once it is no longer needed"),
        (f"{DONE}; offload g 1; free g 1", ALL, "g 1 is left at the end; update its group"),
        (HOST.replace("; free g 1", "").replace("B 1", "U 2; B 1"), ["w 1", "w 2", "o 2"], "g 1 is left at the end; free it"),
        (HOST, ["w 1", "w 2", "o 2"], "g 2 is left at the end; update its group"),
        (f"{DONE}; U 1; offload w 1; free w 1", ALL, "w 1 is not on the device at the end, unlike at the start; prefetch it"),
        (f"wait w 1; {DONE}; U 1; prefetch w 1", ALL, "w 1 is on the device already"),
        (f"wait w 1; {DONE}; U 1", ALL, "w 1 is not arriving at the end, unlike at the start|w 1 is not arriving"),
        (f"prefetch w 1; wait w 1; {DONE}; U 1", ALL[1:], "w 1 is on the device at the end, unlike at the start; free or drop it"),
        (f"prefetch w 1; wait w 1; {DONE}; U 1; offload w 1; free w 1; prefetch w 1", ALL[1:], "w 1 is on the device at the end"),
        (DONE, [*ALL, "w 3"], "resident of the sequence names w 3: the chain has parameter groups 1 to 2"),
    ],
)  # fmt: skip
def test_what_the_machine_refuses(text: str, resident: list[str], sentence: str) -> None:
    with pytest.raises(InvalidSequenceError, match=sentence):
        simulate(CHAIN, Sequence.from_text(text.split("; "), resident=resident))


def test_frozen_groups_are_not_updated_and_a_host_that_cannot_does_not() -> None:
    with pytest.raises(InvalidSequenceError, match=r"op 4 \(U 2\): g 2 has 0 bytes"):
        simulate(TIED, Sequence.from_text(["F_all 1", "F_all 2", "B 2", "B 1", "U 2"], resident=["w 1", "w 2"]))
    text = ["F_all 1", "F_all 2", "B 2", "B 1", "offload g 1", "drop w 1", "H 1"]
    sentence = "group 1 has no host_update_time, so the host cannot update it; use U 1"
    with pytest.raises(InvalidSequenceError, match=sentence):
        simulate(TIED, Sequence.from_text(text, resident=ALL[:1] + ["w 2"]))


def test_a_chain_without_parameters_knows_none() -> None:
    with pytest.raises(InvalidSequenceError, match=r"op 0 \(prefetch w 1\): the chain has no parameters"):
        simulate(CHAIN.without_parameters(), Sequence.from_text(["prefetch w 1"]))
    with pytest.raises(InvalidSequenceError, match="nothing may follow B 1$"):
        simulate(CHAIN.without_parameters(), Sequence.from_text(["F_all 1", "F_all 2", "B 2", "B 1", "B 1"]))


def test_updates_after_the_backward() -> None:
    during = Sequence.from_text(f"{DONE}; U 1".split("; "), resident=ALL)
    after = Sequence.from_text(["F_all 1", "F_all 2", "B 2", "B 1", "U 1", "U 2"], resident=ALL)
    assert simulate(CHAIN, during).makespan == simulate(CHAIN, after, updates="after").makespan == 13
    with pytest.raises(
        InvalidSequenceError, match=r"op 3 \(U 2\): with updates 'after' no group is updated before B 1 has run"
    ):
        simulate(CHAIN, during, updates="after")
    flying = "F_all 1; F_all 2; B 2; B 1; wait o 1; U 1; U 2; offload o 1; free o 1; prefetch o 1"
    with pytest.raises(InvalidSequenceError, match=r"op 4 \(wait o 1\): with updates 'after' only w may be in flight"):
        simulate(CHAIN, Sequence.from_text(flying.split("; "), resident=ALL), updates="after")
    simulate(CHAIN, Sequence.from_text(flying.split("; "), resident=ALL))


# -- parts


def test_large_groups_are_made_of_parts() -> None:
    block = [4, 4, 4, 4, 16, 16]
    assert in_parts("qkvoud", block, 0) == [list("qkvo"), ["u"], ["d"]]
    assert in_parts("qkvoud", block, 40 * sum(block)) == [list("qkvo"), ["u"], ["d"]]
    assert in_parts("qkvoud", block, 60 * sum(block)) == [list("qkvou"), ["d"]]  # parts of a share of 1/128
    assert in_parts("qkvoud", block, 100 * sum(block)) == [list("qkvoud")]
    assert in_parts("wb", [100, 1], 0) == [["w", "b"]]
    assert in_parts("bw", [1, 100], 0) == [["b", "w"]]
    assert in_parts("a", [0], 0) == [["a"]]


# -- files


def test_a_chain_with_parameters_is_a_file_of_version_2(tmp_path: Path) -> None:
    chain = replace(TIED, parameters=(*TIED.parameters, replace(GROUPS[0], name="head", extra={"dtype": "bfloat16"})))
    chain.save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json") == chain
    data = chain.to_dict()
    assert data["version"] == 2
    assert data["parameters"][2]["dtype"] == "bfloat16"
    assert data["parameters"][0]["stages"] == [2, 1]
    assert "host_update_time" not in data["parameters"][0]
    assert Chain.from_dict({**data, "parameters": []}).to_dict()["version"] == 1
    assert chain.without_parameters().to_dict() == Chain(STAGES, 10, 20).to_dict()
    frozen = Chain.from_dict({**data, "parameters": [{"stages": [1], "bytes": 5}]}).group(1)
    assert frozen == ParameterGroup((1,), 5, 0, 0, 0.0, None, 0, "")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stages": []}, "stages of a group of parameters is empty; name at least one"),
        ({"stages": 3}, "stages of a group of parameters is 3; give a sequence"),
        ({"stages": [0]}, "names 0; stages are whole numbers from 1"),
        ({"stages": [1.5]}, "names 1.5; stages are whole numbers from 1"),
        ({"stages": [True]}, "names True; stages are whole numbers from 1"),
        ({"stages": [1, 1]}, r"is \[1, 1\]; name each stage once"),
        ({"stages": [3]}, "group 1 of the parameters names stage 3, but the chain has stages 1 to 2"),
        ({"bytes": -1}, "bytes of a group of parameters is -1; give a finite number at or above 0"),
        ({"bytes": 1.5}, "bytes of a group of parameters is 1.5; give a whole number of bytes"),
        ({"grad_bytes": float("nan")}, "grad_bytes of a group of parameters is nan"),
        ({"update_time": -1}, "update_time of a group of parameters is -1"),
        ({"host_update_time": float("inf")}, "host_update_time of a group of parameters is inf"),
        ({"grad_bytes": 0}, "state_bytes of a group of parameters is 80, but grad_bytes is 0; frozen parameters have no"),
        ({"name": 3}, "name of a group of parameters is 3; give text"),
        ({"name": "head", "bytes": -1}, "bytes of parameters 'head' is -1"),
    ],
)  # fmt: skip
def test_what_is_not_a_group(changes: dict, sentence: str) -> None:
    data = {**CHAIN.to_dict(), "parameters": [{**GROUPS[0].to_dict(), **changes}]}
    with pytest.raises(ChainError, match=sentence):
        Chain.from_dict(data)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, r"parameters of the chain is \{\}, not a list"),
        ([3], "group 1 of the parameters is 3, not an object"),
        ([{"bytes": 3}], "group 1 of the parameters misses the field 'stages'"),
        ([{"stages": [1]}], "group 1 of the parameters misses the field 'bytes'"),
        ([{"stages": [1], "bytes": 3, "grad_bytes": 3}], "group 1 of the parameters misses the field 'update_time'"),
    ],
)
def test_what_is_not_a_list_of_groups(parameters: object, sentence: str) -> None:
    with pytest.raises(ChainError, match=sentence):
        Chain.from_dict({**CHAIN.to_dict(), "parameters": parameters})


def test_a_chain_of_version_1_has_no_parameters() -> None:
    with pytest.raises(ChainError, match="a chain file of version 1 cannot have parameters; give version 2"):
        Chain.from_dict({**CHAIN.to_dict(), "version": 1})
    with pytest.raises(ChainError, match="group 1 of the parameters is 'w', not a rotoff.ParameterGroup"):
        replace(CHAIN, parameters=["w"])
    with pytest.raises(IndexError, match="groups 1 to 2, not 3"):
        CHAIN.group(3)
    with pytest.raises(ChainError, match="more than 1e308 seconds"):
        replace(CHAIN, parameters=[replace(GROUPS[0], update_time=1e308, host_update_time=1e308)])
    assert rotoff.ParameterGroup is ParameterGroup
