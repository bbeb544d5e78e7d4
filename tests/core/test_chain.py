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


def test_chains_are_frozen_values() -> None:
    chain = Chain.from_dict(plain_chain())
    assert chain == Chain.from_dict(plain_chain())
    assert hash(chain.stage(1).form(0)) == hash(chain.stage(2).form(0))
    with pytest.raises(AttributeError):
        chain.input_bytes = 9  # type: ignore[misc]
    with pytest.raises(AttributeError):
        chain.stage(1).saved_bytes = 9  # type: ignore[misc]


# -- files


def test_a_file_reads_back(tmp_path: Path) -> None:
    forms = (Form(20, 2.5, 1, 2), Form(12, 3.0))
    full = Stage("conv ā", 0.5, 1.25, 10, 30, 11, 3, 4, 5, forms)
    chain = Chain(
        (full, Stage("fc", 1 / 3, 0.1, 2**40, 2**41)), 12.5e9, 11e9, 8, 6, False, "net", meta={"torch": "2.13"}
    )
    chain.save(tmp_path / "chain.json")
    back = Chain.load(str(tmp_path / "chain.json"))
    assert back == chain
    assert back.meta == {"torch": "2.13"}
    assert back.to_dict() == chain.to_dict()


def test_the_file_has_the_fields_of_the_format(tmp_path: Path) -> None:
    Chain.from_dict(plain_chain()).save(tmp_path / "chain.json")
    data = json.loads((tmp_path / "chain.json").read_text())
    assert (data["format"], data["version"]) == ("rotoff.chain", 1)
    assert data["stages"][0] == {
        "name": "",
        "forward_time": 1.0,
        "backward_time": 2.0,
        "output_bytes": 10,
        "saved_bytes": 30,
        "grad_bytes": 10,
        "forward_transient_bytes": 0,
        "checkpoint_transient_bytes": 0,
        "backward_transient_bytes": 0,
    }


def test_unknown_fields_of_a_form_are_kept(tmp_path: Path) -> None:
    form = {"saved_bytes": 12, "backward_time": 2.5, "kept": ["addmm"]}
    chain = Chain.from_dict(plain_chain(stages=[plain_stage(forms=[form])]))
    assert chain.stage(1).forms == (Form(12, 2.5),)
    chain.save(tmp_path / "chain.json")
    assert json.loads((tmp_path / "chain.json").read_text())["stages"][0]["forms"][0]["kept"] == ["addmm"]


def test_unknown_fields_are_kept(tmp_path: Path) -> None:
    data = plain_chain(origin={"by": "hand"}, meta={"device": "cpu"}, stages=[plain_stage(colour="red"), plain_stage()])
    Chain.from_dict(data).save(tmp_path / "chain.json")
    back = json.loads((tmp_path / "chain.json").read_text())
    assert back["origin"] == {"by": "hand"}
    assert back["meta"] == {"device": "cpu"}
    assert back["stages"][0]["colour"] == "red"
    assert "colour" not in back["stages"][1]


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

BAD_NUMBERS = [math.nan, math.inf, -1, -0.5, True, "30", None, [30]]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["forward_time", "backward_time", "output_bytes", "saved_bytes"])
def test_a_bad_number_in_a_stage_names_stage_and_field(name: str, value: Any) -> None:
    with pytest.raises(ChainError, match=f"^stage 2: {name} of stage 'fc' is "):
        Chain.from_dict(plain_chain(stages=[plain_stage(), plain_stage(name="fc", **{name: value})]))


@pytest.mark.parametrize("value", [value for value in BAD_NUMBERS if value is not None], ids=repr)
@pytest.mark.parametrize(
    "name", ["grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes", "backward_transient_bytes"]
)
def test_a_bad_optional_number_names_it(name: str, value: Any) -> None:
    with pytest.raises(ChainError, match=f"{name} of stage 's' is "):
        Stage("s", 1.0, 2.0, 10, 30, **{name: value})


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 0], ids=repr)
@pytest.mark.parametrize("name", ["d2h_bandwidth", "h2d_bandwidth"])
def test_a_bad_bandwidth_names_it(name: str, value: Any) -> None:
    with pytest.raises(ChainError, match=f"^{name} of the chain is "):
        Chain.from_dict(plain_chain(**{name: value}))


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["input_bytes", "input_grad_bytes"])
def test_a_bad_input_size_names_it(name: str, value: Any) -> None:
    with pytest.raises(ChainError, match=f"^{name} of the chain is "):
        Chain.from_dict(plain_chain(**{name: value}))


def test_a_fraction_of_a_byte_is_refused() -> None:
    with pytest.raises(ChainError, match="saved_bytes of stage 's' is 30.5; give a whole number of bytes"):
        Stage("s", 1.0, 2.0, 10, 30.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["forward_time", "backward_time", "output_bytes", "saved_bytes"])
def test_a_missing_field_of_a_stage_is_named(name: str) -> None:
    with pytest.raises(ChainError, match=f"^stage 2 misses the field '{name}'"):
        Chain.from_dict(plain_chain(stages=[plain_stage(), without(plain_stage(), name)]))


@pytest.mark.parametrize("name", ["d2h_bandwidth", "h2d_bandwidth", "input_bytes", "stages"])
def test_a_missing_field_of_the_chain_is_named(name: str) -> None:
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
        (plain_chain(stages={}), "not a list"),
        (plain_chain(stages=[3]), "stage 1 is 3, not an object"),
        (plain_chain(duplex="yes"), "duplex of the chain is 'yes'; give true or false"),
        (plain_chain(duplex=1), "duplex of the chain is 1; give true or false"),
        (plain_chain(meta=[1]), "meta of the chain is \\[1\\], not an object"),
        (plain_chain(stages=[plain_stage(forms=3)]), "forms of stage 1 is 3, not a list"),
        (plain_chain(stages=[plain_stage(forms=[3])]), "stage 1: form 1 is 3, not an object"),
        (plain_chain(stages=[plain_stage(forms=[{"saved_bytes": 1}])]), "form 1 misses the field 'backward_time'"),
        (
            plain_chain(stages=[plain_stage(forms=[{"saved_bytes": -1, "backward_time": 1}])]),
            "stage 1: saved_bytes of form 1 of a stage is -1",
        ),
    ],
)
def test_what_is_not_a_chain(data: Any, sentence: str) -> None:
    with pytest.raises(ChainError, match=sentence) as caught:
        Chain.from_dict(data)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Chain((), 1.0, 1.0), "no stages"),
        (lambda: Chain([plain_stage()], 1.0, 1.0), "not a rotoff.Stage"),
        (lambda: Stage("s", forms=(3,)), "form 1 of stage 's' is 3, not a rotoff.Form"),
    ],
)
def test_what_cannot_be_built(build: Any, sentence: str) -> None:
    with pytest.raises(ChainError, match=sentence):
        build()


@pytest.mark.parametrize("text", ["", "{", "F_all 1", '{"format": "rotoff.chain"', "\x00"])
def test_a_file_that_is_not_json_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ChainError, match=r"broken\.json is not JSON: "):
        Chain.load(path)


def test_a_file_that_is_not_text_is_a_chain_error(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x02\xff\xfe")
    with pytest.raises(ChainError, match=r"model\.pt is not JSON"):
        Chain.load(path)


def test_a_wrong_file_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(plain_chain(stages=[plain_stage(saved_bytes=-1)])))
    with pytest.raises(ChainError, match=r"chain\.json: stage 1: saved_bytes of a stage is -1"):
        Chain.load(path)


def test_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(plain_chain(stages=[plain_stage(forward_time=math.nan)])))
    with pytest.raises(ChainError, match="forward_time of a stage is nan"):
        Chain.load(path)


@pytest.mark.parametrize("name", ["forward_time", "saved_bytes", "output_bytes"])
def test_numbers_beyond_any_float_are_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(plain_chain(stages=[plain_stage(**{name: 10**400})])))
    with pytest.raises(ChainError, match=f"stage 1: {name} of a stage is above 1e308"):
        Chain.load(path)


def test_times_that_come_to_infinity_are_refused() -> None:
    with pytest.raises(ChainError, match="times of the chain's stages come to more than 1e308"):
        Chain.from_dict(plain_chain(stages=[plain_stage(forward_time=1e308), plain_stage(backward_time=1e308)]))


def test_a_file_nested_too_deeply_is_a_chain_error(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ChainError, match="is not JSON"):
        Chain.load(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Chain.load(tmp_path / "none.json")


def test_a_saved_set_holds_its_output() -> None:
    with pytest.raises(
        ChainError, match="saved_bytes of a stage is 5, less than its output_bytes of 10; saved_bytes counts"
    ):
        Stage("", 1.0, 1.0, 10, 5)
    plain = plain_stage(name="one", output_bytes=10, saved_bytes=20, forms=[{"saved_bytes": 5, "backward_time": 1.0}])
    with pytest.raises(
        ChainError, match="stage 1: saved_bytes of form 1 of stage 'one' is 5, less than its output_bytes of 10"
    ):
        Chain.from_dict(plain_chain(stages=[plain]))
