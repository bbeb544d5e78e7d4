"""Chains: defaults, files both ways, and one sentence for each way of being wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rotoff
from rotoff import Chain, ChainError, Form, Stage


def plain_stage(**changes: Any) -> dict[str, Any]:
    return {"forward_time": 1.0, "backward_time": 2.0, "output_bytes": 10, "saved_bytes": 30, **changes}


def plain_chain(**changes: Any) -> dict[str, Any]:
    head = {"format": "rotoff.chain", "version": 1, "d2h_bandwidth": 1e9, "h2d_bandwidth": 2e9, "input_bytes": 8}
    return {**head, "stages": [plain_stage(), plain_stage()], **changes}


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


# -- defaults


def test_what_is_left_out_has_the_defaults_of_the_format() -> None:
    chain = Chain.from_dict(plain_chain())
    stage = chain.stage(1)
    assert (chain.name, chain.duplex, chain.input_grad_bytes) == ("", True, 0)
    assert (stage.name, stage.grad_bytes, stage.forms) == ("", 10, ())
    transients = (stage.forward_transient_bytes, stage.checkpoint_transient_bytes, stage.backward_transient_bytes)
    assert transients == (0, 0, 0)


def test_defaults_follow_other_fields() -> None:
    stage = Stage("s", 1.0, 2.0, 10, 30, forward_transient_bytes=7, backward_transient_bytes=5)
    assert stage.checkpoint_transient_bytes == 7
    assert stage.form(0) == Form(30, 2.0, 7, 5)
    zero = Stage("s", 1.0, 2.0, 10, 30, grad_bytes=0, forward_transient_bytes=7, checkpoint_transient_bytes=0)
    assert (zero.grad_bytes, zero.checkpoint_transient_bytes) == (0, 0)


def test_a_form_left_transients_out_takes_the_stages_own() -> None:
    forms = [{"saved_bytes": 20, "backward_time": 2.5}]
    stage = plain_stage(forward_transient_bytes=3, backward_transient_bytes=4, forms=forms)
    chain = Chain.from_dict(plain_chain(stages=[stage]))
    assert chain.stage(1).form(1) == Form(20, 2.5, 3, 4)
    with pytest.raises(IndexError, match="forms 0 to 1, not 2"):
        chain.stage(1).form(2)


def test_stages_count_from_one() -> None:
    chain = Chain.from_dict(plain_chain(input_grad_bytes=6))
    assert len(chain) == 2
    assert chain.stage(2) is chain.stages[1]
    assert (chain.output_bytes(0), chain.output_bytes(1)) == (8, 10)
    assert (chain.grad_bytes(0), chain.grad_bytes(2)) == (6, 10)
    assert chain.compute_time == 6.0
    for i in (0, -1, 3):
        with pytest.raises(IndexError, match="stages 1 to 2"):
            chain.stage(i)


def test_numpy_numbers_become_plain_ones() -> None:
    stage = Stage("s", np.float32(1.5), np.float64(2), np.int64(10), np.int32(30))
    chain = Chain((stage,), np.float64(1e9), 1e9, np.int64(8))
    assert json.loads(json.dumps(chain.to_dict())) == chain.to_dict()
    assert {type(stage.output_bytes), type(stage.saved_bytes), type(chain.input_bytes)} == {int}
    assert {type(stage.forward_time), type(chain.d2h_bandwidth)} == {float}


def test_a_chain_of_one_stage_of_zeros_is_a_chain() -> None:
    chain = Chain((Stage(),), 1.0, 1.0)
    assert rotoff.simulate(chain, rotoff.Sequence.from_text("F_all 1\nB 1")).makespan == 0.0


# -- files


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    form = {"saved_bytes": 12, "backward_time": 2.5, "kept": ["addmm"]}
    stages = [plain_stage(colour="red", forms=[form]), plain_stage()]
    chain = Chain.from_dict(plain_chain(origin={"by": "hand"}, meta={"device": "cpu"}, stages=stages))
    chain.save(tmp_path / "chain.json")
    back = json.loads((tmp_path / "chain.json").read_text())
    assert (back["format"], back["version"], back["origin"]) == ("rotoff.chain", 1, {"by": "hand"})
    assert back["stages"][0]["colour"] == "red"
    assert back["stages"][0]["forms"][0]["kept"] == ["addmm"]
    optional = ("grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes", "backward_transient_bytes")
    assert back["stages"][1] == {"name": "", **plain_stage(), **dict.fromkeys(optional, 0), "grad_bytes": 10}
    again = Chain.load(str(tmp_path / "chain.json"))
    assert again == chain
    assert again.meta == {"device": "cpu"}


sizes = st.integers(0, 2**50)
times = st.floats(0, 1e6)
stages = st.builds(
    Stage,
    st.text(max_size=8),
    *(times, times, sizes, sizes.map(lambda size: 2**50 + size), st.none() | sizes, sizes, st.none() | sizes, sizes),
    st.lists(st.builds(Form, sizes.map(lambda size: 2**50 + size), times, sizes, sizes), max_size=2).map(tuple),
)
bandwidths = st.floats(1e-3, 1e15)
chains = st.builds(
    Chain, st.lists(stages, min_size=1, max_size=5), bandwidths, bandwidths, sizes, sizes, st.booleans(), st.text()
)


@given(chains)
def test_every_chain_survives_its_file_format(chain: Chain) -> None:
    assert Chain.from_dict(json.loads(json.dumps(chain.to_dict()))) == chain


# -- what is not a chain

BAD_NUMBERS = [math.nan, math.inf, -1, -0.5, True, "30", [30]]
TIMES, SIZES = ("forward_time", "backward_time"), ("output_bytes", "saved_bytes")
OPTIONAL = ("grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes", "backward_transient_bytes")


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
def test_a_bad_number_names_stage_and_field(value: Any) -> None:
    for name in (*TIMES, *SIZES, *OPTIONAL):
        with pytest.raises(ChainError, match=f"^stage 2: {name} of stage 'fc' is "):
            Chain.from_dict(plain_chain(stages=[plain_stage(), plain_stage(name="fc", **{name: value})]))
    for name in ("d2h_bandwidth", "h2d_bandwidth", "input_bytes", "input_grad_bytes"):
        with pytest.raises(ChainError, match=f"^{name} of the chain is "):
            Chain.from_dict(plain_chain(**{name: value}))


def test_what_misses_is_named() -> None:
    for name in (*TIMES, *SIZES):
        with pytest.raises(ChainError, match=f"^stage 2 misses the field '{name}'"):
            Chain.from_dict(plain_chain(stages=[plain_stage(), without(plain_stage(), name)]))
        with pytest.raises(ChainError, match=f"^stage 1: {name} of a stage is None"):
            Chain.from_dict(plain_chain(stages=[plain_stage(**{name: None})]))
    for name in ("d2h_bandwidth", "h2d_bandwidth", "input_bytes", "stages"):
        with pytest.raises(ChainError, match=f"^the chain misses the field '{name}'"):
            Chain.from_dict(without(plain_chain(), name))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], 'the field "format" must be "rotoff.chain"'),
        (None, 'the field "format" must be "rotoff.chain"'),
        (without(plain_chain(), "format"), 'the field "format" must be "rotoff.chain"'),
        (plain_chain(format="rotoff.sequence"), 'the field "format" must be "rotoff.chain"'),
        (plain_chain(version=3), "version 3; this rotoff reads versions 1 and 2"),
        (without(plain_chain(), "version"), "version None"),
        (plain_chain(stages=[]), "has no stages; it needs at least one"),
        (plain_chain(d2h_bandwidth=0), "^d2h_bandwidth of the chain is "),
        (plain_chain(stages=[plain_stage(saved_bytes=30.5)]), "saved_bytes of a stage is 30.5; give a whole number of"),
        (plain_chain(stages=[plain_stage(saved_bytes=5)]), "saved_bytes of a stage is 5, less than its output_bytes"),
        (plain_chain(stages=[plain_stage(saved_bytes=10**400)]), "stage 1: saved_bytes of a stage is above 1e308"),
        (
            plain_chain(stages=[plain_stage(forward_time=1e308), plain_stage(backward_time=1e308)]),
            "times of the chain's stages come to more than 1e308",
        ),
        (
            plain_chain(stages=[plain_stage(name="one", forms=[{"saved_bytes": 5, "backward_time": 1.0}])]),
            "stage 1: saved_bytes of form 1 of stage 'one' is 5, less than its output_bytes of 10",
        ),
        (plain_chain(stages={}), "not a list"),
        (plain_chain(stages=[3]), "stage 1 is 3, not an object"),
        (plain_chain(duplex="yes"), "duplex of the chain is 'yes'; give true or false"),
        (plain_chain(duplex=1), "duplex of the chain is 1; give true or false"),
        (plain_chain(meta=[1]), "meta of the chain is \\[1\\], not an object"),
        (plain_chain(stages=[plain_stage(forms=3)]), "forms of stage 1 is 3, not a list"),
        (plain_chain(stages=[plain_stage(forms=[3])]), "stage 1: form 1 is 3, not an object"),
        (plain_chain(stages=[plain_stage(forms=[{"saved_bytes": 1}])]), "form 1 misses the field 'backward_time'"),
        (plain_chain(stages=[plain_stage(forms=[{"saved_bytes": -1, "backward_time": 1}])]), "stage 1: saved_bytes of form 1 of a stage is -1"),
    ],
)  # fmt: skip
def test_what_is_not_a_chain(data: Any, sentence: str) -> None:
    with pytest.raises(ChainError, match=sentence) as caught:
        Chain.from_dict(data)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *((text, "is not JSON: ") for text in (b"", b"{", b"F_all 1", b'{"format": "rotoff.chain"', b"[" * 100_000)),
        (b"\x80\x02\xff\xfe", "is not JSON"),
        (json.dumps(plain_chain(stages=[plain_stage(saved_bytes=-1)])).encode(), "stage 1: saved_bytes of a stage is -1"),
        (json.dumps(plain_chain(d2h_bandwidth=math.nan)).encode(), "d2h_bandwidth of the chain is nan"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "chain.json"
    path.write_bytes(content)
    with pytest.raises(ChainError, match=f"chain\\.json:? {sentence}"):
        Chain.load(path)
    with pytest.raises(FileNotFoundError):
        Chain.load(tmp_path / "none.json")
