"""Operations and sequences as values, as text and as files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rotoff
from rotoff import Op, OpKind, Sequence, SequenceFormatError
from rotoff.core import sequence as ops
from rotoff.core.sequence import a, abar, g, o, w

TEXTS = {
    "F_all 3": ops.F_all(3),
    "F_sel 3 1": ops.F_sel(3, 1),
    "F_ck 12": ops.F_ck(12),
    "F_none 2": ops.F_none(2),
    "B 1": ops.B(1),
    "offload a 4": ops.offload(a(4)),
    "offload abar 4": ops.offload(abar(4)),
    "free a 4": ops.free(a(4)),
    "prefetch abar 10": ops.prefetch(abar(10)),
    "wait abar 10": ops.wait(abar(10)),
    "drop a 7": ops.drop(a(7)),
    "U 2": ops.U(2),
    "H 2": ops.H(2),
    "prefetch w 3": ops.prefetch(w(3)),
    "offload g 3": ops.offload(g(3)),
    "free o 3": ops.free(o(3)),
}


@pytest.mark.parametrize(("text", "op"), TEXTS.items())
def test_an_operation_is_one_line_of_text(text: str, op: Op) -> None:
    assert str(op) == text
    assert rotoff.parse(text) == op
    assert rotoff.parse(f"  {text.replace(' ', '   ')} ") == op


VALUES = [(False, ""), (True, ""), (False, "w"), (False, "g"), (False, "o")]


def draw_op(kind: OpKind, stage: int, form: int, value: tuple[bool, str]) -> Op:
    saved, of = value if kind in ops.TRANSFERS else (False, "")
    return Op(kind, stage, form if kind is OpKind.F_SEL else 0, saved, of)


operations = st.builds(
    draw_op, st.sampled_from(OpKind), st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(VALUES)
)


@given(operations)
def test_parse_is_the_reverse_of_str(op: Op) -> None:
    assert rotoff.parse(str(op)) == op


@pytest.mark.parametrize(
    "text",
    [
        *("", "F_all", "F_all x", "F_all -1", "F_all 1 2", "F_all 1.0", "f_all 1", "F_all1", "F_all ١"),
        *("F_sel 1", "F_sel 1 0", "F_sel 1 -1", "F_sel 1 x", "B", "B a 1", "B abar 1"),
        *("U", "U w 1", "H 1 2", "U -1", "offload W 1", "offload o", "wait g x"),
        *("offload 1", "offload b 1", "offload a", "offload a x", "offload a 1 2", "load a 1", "wait Abar 1"),
        *(None, 3, ["F_all", "1"], ops.F_all(1)),
    ],
)
def test_what_is_not_an_operation(text: Any) -> None:
    with pytest.raises(SequenceFormatError) as caught:
        rotoff.parse(text)
    assert str(caught.value).startswith(f"{text!r} is not an operation")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("kind", [OpKind.B, OpKind.U, OpKind.F_ALL])
def test_only_moves_name_values_of_groups(kind: OpKind) -> None:
    with pytest.raises(SequenceFormatError, match="a move takes values of 'w', 'g' or 'o'"):
        Op(kind, 1, of="w")
    with pytest.raises(SequenceFormatError, match="no offload of a value of 'x'"):
        Op(OpKind.OFFLOAD, 1, of="x")
    with pytest.raises(SequenceFormatError, match="of 'w' that is saved"):
        Op(OpKind.OFFLOAD, 1, saved=True, of="w")


def test_a_sequence_says_what_is_resident() -> None:
    made = Sequence.from_text("F_all 1\nB 1\nU 1", resident=["w  1", "o 1"])
    assert made.resident == ["w 1", "o 1"]
    assert made.to_dict()["resident"] == ["w 1", "o 1"]
    assert Sequence.from_dict(made.to_dict()) == made
    assert made != Sequence.from_text("F_all 1\nB 1\nU 1", resident=["w 1"])
    assert Sequence.from_text("H 1").to_dict()["resident"] == []
    assert "resident" not in Sequence.from_text("F_all 1\nB 1").to_dict()


@pytest.mark.parametrize(
    ("resident", "sentence"),
    [
        ("w 1", "give a list of texts"),
        (3, "give a list of texts"),
        ([1], "1 is not a value"),
        (["w"], "'w' is not a value"),
        (["a 1"], "names a 1; between steps the device holds only w and o"),
        (["g 1"], "names g 1; between steps"),
        (["w 1", "w 1"], "names w 1 twice"),
    ],
)
def test_what_cannot_be_resident(resident: Any, sentence: str) -> None:
    with pytest.raises(SequenceFormatError, match=sentence):
        Sequence.from_text("F_all 1", resident=resident)


STEP = """
F_ck 1
F_all 2

B 2
F_all 1
B 1
"""


def test_a_sequence_is_a_sequence_of_operations() -> None:
    sequence = Sequence.from_text(STEP, mode="remat", mem_limit=100)
    assert [str(op) for op in sequence] == ["F_ck 1", "F_all 2", "B 2", "F_all 1", "B 1"]
    assert str(sequence) == "F_ck 1\nF_all 2\nB 2\nF_all 1\nB 1"
    assert len(sequence) == 5
    assert sequence[0] == ops.F_ck(1)
    assert sequence[-2:] == (ops.F_all(1), ops.B(1))
    assert (sequence.mode, sequence.mem_limit) == ("remat", 100)
    assert Sequence.from_text(str(sequence), mode="remat", mem_limit=100) == sequence
    with pytest.raises(SequenceFormatError, match=r"'F_all 1' is not a rotoff\.Op; use rotoff\.parse"):
        Sequence(("F_all 1",))  # type: ignore[arg-type]


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    data = {"format": "rotoff.sequence", "version": 1, "mode": "", "ops": ["F_all 1", "B 1"], "seed": 3}
    Sequence.from_dict({**data, "mem_limit": 10.5, "meta": {"solver": "x"}}).save(tmp_path / "sequence.json")
    back = json.loads((tmp_path / "sequence.json").read_text())
    assert back == {**data, "mem_limit": 10, "meta": {"solver": "x"}}
    assert Sequence.load(str(tmp_path / "sequence.json")) == Sequence.from_dict(back)


@given(st.lists(operations, max_size=20), st.text(max_size=5), st.none() | st.integers(1, 2**50))
def test_every_sequence_survives_its_file_format(items: list[Op], mode: str, limit: int | None) -> None:
    sequence = Sequence(tuple(items), mode, limit)
    assert Sequence.from_dict(json.loads(json.dumps(sequence.to_dict()))) == sequence


GOOD = {"format": "rotoff.sequence", "version": 1, "ops": ["F_all 1", "B 1"]}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, 'the field "format" must be "rotoff.sequence"'),
        ([], 'the field "format" must be "rotoff.sequence"'),
        ({**GOOD, "format": "rotoff.chain"}, 'the field "format" must be "rotoff.sequence"'),
        ({**GOOD, "version": 2}, "version 2; this rotoff reads version 1"),
        ({**GOOD, "ops": "F_all 1"}, '"ops", a list of texts'),
        ({**GOOD, "ops": None}, '"ops", a list of texts'),
        ({**GOOD, "ops": [1]}, "1 is not an operation"),
        ({**GOOD, "ops": ["F_all 1", "G 1"]}, "'G 1' is not an operation"),
        ({**GOOD, "mode": 3}, '"mode" is text'),
        ({**GOOD, "meta": 3}, '"meta" an object'),
        ({**GOOD, "mem_limit": "6 GiB"}, "\"mem_limit\" of the sequence is '6 GiB'"),
        *(
            ({**GOOD, "mem_limit": limit}, f'"mem_limit" of the sequence is {limit}')
            for limit in (True, math.nan, math.inf, -1, 0)
        ),
    ],
)
def test_what_is_not_a_sequence(data: Any, sentence: str) -> None:
    with pytest.raises(SequenceFormatError, match=sentence):
        Sequence.from_dict(data)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("F_all 1\nB 1\n")
    with pytest.raises(SequenceFormatError, match=r"plan\.json is not JSON: "):
        Sequence.load(path)
    path.write_text(json.dumps({**GOOD, "ops": ["F_all one"]}))
    with pytest.raises(SequenceFormatError, match=r"plan\.json: 'F_all one' is not an operation"):
        Sequence.load(path)
    with pytest.raises(FileNotFoundError):
        Sequence.load(tmp_path / "none.json")
