"""What people get wrong when they ask for a plan: one clear sentence and a typed error each, or the right result."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rotoff
from rotoff import (
    Chain,
    ChainError,
    InfeasibleError,
    LimitError,
    OptionError,
    ParameterGroup,
    SequenceFormatError,
    Stage,
)
from rotoff.cli.command import read_chain
from rotoff.solver import keep_all
from rotoff.solver.joint import solve_slots

MODES = ("joint", "remat", "offload")
CHAIN = Chain(tuple(Stage(f"s{i}", 1.0, 2.0, 10 * i, 30 * i) for i in (1, 2, 3)), 50.0, 50.0, input_bytes=10)
KEEP_ALL_BYTES = 10 + 30 + 60 + 90 + 30 + 20  # a_0, all ā, δ_3 and δ_2

BAD_LIMITS = [
    (0, "must be above 0"),
    (-1, "must be above 0"),
    (math.nan, "is nan"),
    (math.inf, "is inf"),
    (0.5, "looks like a fraction"),
    (True, "is True"),
    (None, "is None"),
    ("6 GiBs", "unknown unit 'GiBs'"),
    ("", "is ''"),
    ("most of it", "is 'most of it'"),
]


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return 20 <= len(text) <= 300 and "\n" not in text


# -- limits, modes and options, in planning


@pytest.mark.parametrize(("limit", "sentence"), BAD_LIMITS, ids=repr)
def test_solve_refuses_what_is_no_limit(limit: Any, sentence: str) -> None:
    with pytest.raises(LimitError, match=re.escape(sentence)) as caught:
        rotoff.solve(CHAIN, limit)
    assert one_sentence(caught.value)


@pytest.mark.parametrize(("limit", "sentence"), BAD_LIMITS, ids=repr)
def test_lower_bound_refuses_what_is_no_limit(limit: Any, sentence: str) -> None:
    with pytest.raises(LimitError, match=re.escape(sentence)):
        rotoff.lower_bound(CHAIN, limit)


@pytest.mark.parametrize("mode", ["", "Joint", "checkpoint", "keep-all", None, 3, ["joint"]])
def test_an_unknown_mode_names_the_modes(mode: Any) -> None:
    for ask in (lambda: rotoff.solve(CHAIN, 200, mode=mode), lambda: rotoff.min_mem_limit(CHAIN, mode)):
        with pytest.raises(OptionError, match=re.escape(repr(mode))) as caught:
            ask()
        assert all(name in str(caught.value) for name in MODES)
        assert one_sentence(caught.value)


@pytest.mark.parametrize("slots", [0, -1, 1.5, math.nan, True, None, "50"], ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_slots_are_a_whole_number_of_at_least_one(slots: Any, mode: str) -> None:
    with pytest.raises(OptionError, match="mem_slots") as caught:
        rotoff.solve(CHAIN, 200, mode=mode, mem_slots=slots)
    assert one_sentence(caught.value)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_few_slots_still_give_a_plan(slots: int, mode: str) -> None:
    limit = rotoff.min_mem_limit(CHAIN, mode)
    sequence = rotoff.solve(CHAIN, limit, mode=mode, mem_slots=slots)
    assert rotoff.simulate(CHAIN, sequence, limit).peak_bytes <= limit


@pytest.mark.parametrize("ask", [lambda x: rotoff.lower_bound(x, 200), lambda x: rotoff.min_mem_limit(x, "joint")])
def test_what_is_no_chain_is_named(ask: Any) -> None:
    with pytest.raises(ChainError, match="the chain is 'chain.json'") as caught:
        ask("chain.json")
    assert one_sentence(caught.value)


def test_a_bound_at_more_bytes_than_a_float_holds_is_that_of_plenty() -> None:
    assert rotoff.lower_bound(CHAIN, 10**400) == rotoff.lower_bound(CHAIN, 10**12) == CHAIN.compute_time
    placed = replace(CHAIN, parameters=(rotoff.ParameterGroup((1,), 5, 5, 10, update_time=0.5),))
    assert rotoff.lower_bound(placed, 10**400) == pytest.approx(placed.compute_time + 0.5)


def test_text_in_place_of_operations_is_refused() -> None:
    with pytest.raises(
        rotoff.InvalidSequenceError, match=r"op 0 \(F_all 1\): is not a rotoff.Op; make one with rotoff.parse"
    ) as caught:
        rotoff.simulate(CHAIN, ["F_all 1", "F_all 2"])  # type: ignore[list-item]
    assert one_sentence(caught.value)
    with pytest.raises(rotoff.SequenceFormatError, match="is not an operation"):
        rotoff.parse("F_all " + "1" * 5000)


def test_a_link_that_hardly_moves_has_a_bound_without_a_warning() -> None:
    slow = replace(CHAIN, d2h_bandwidth=5e-324)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            CHAIN.compute_time <= rotoff.lower_bound(slow, 200) <= rotoff.solve(slow, 200).meta["makespan"] * (1 + 1e-9)
        )


# -- limits as people write them


@pytest.mark.parametrize("limit", [200, 200.9, "200", "200 B", "0.2 kB"])
def test_all_ways_to_write_a_limit_give_the_same_plan(limit: Any) -> None:
    sequence = rotoff.solve(CHAIN, limit)
    assert sequence.mem_limit == 200
    assert sequence == rotoff.solve(CHAIN, 200)


# -- too small, and large enough


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_too_small_names_the_smallest_that_works(mode: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        rotoff.solve(CHAIN, 20, mode=mode)
    least = caught.value.min_mem_limit
    assert least == rotoff.min_mem_limit(CHAIN, mode)
    assert str(least) in str(caught.value)
    assert mode in str(caught.value)
    assert "20" in str(caught.value)
    assert one_sentence(caught.value)
    sequence = rotoff.solve(CHAIN, least, mode=mode)
    assert rotoff.simulate(CHAIN, sequence, least).peak_bytes <= least
    with pytest.raises(InfeasibleError):
        rotoff.solve(CHAIN, least - 1, mode=mode)


@pytest.mark.parametrize("limit", [KEEP_ALL_BYTES, 10**30, "8 PiB"])
@pytest.mark.parametrize("mode", MODES)
def test_with_enough_memory_nothing_is_done(mode: str, limit: Any) -> None:
    sequence = rotoff.solve(CHAIN, limit, mode=mode)
    assert str(sequence) == "F_all 1\nF_all 2\nF_all 3\nB 3\nB 2\nB 1"


# -- chains at the edge


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_of_one_stage(mode: str) -> None:
    chain = Chain((Stage("s", 1.0, 2.0, 10, 30),), 1.0, 1.0, input_bytes=5)
    assert rotoff.min_mem_limit(chain, mode) == 5 + 30 + 10
    assert str(rotoff.solve(chain, 45, mode=mode)) == "F_all 1\nB 1"
    with pytest.raises(InfeasibleError, match="45"):
        rotoff.solve(chain, 44, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_of_no_bytes_and_no_time(mode: str) -> None:
    chain = Chain((Stage(), Stage(), Stage()), 1.0, 1.0)
    assert rotoff.simulate(chain, rotoff.solve(chain, 1, mode=mode), 1).makespan == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_stages_of_no_bytes_or_no_time_among_others(mode: str) -> None:
    empty = Stage("free", 0.0, 0.0, 10, 10), Stage("nothing", 1.0, 1.0)
    chain = replace(CHAIN, stages=(Stage("view"), *CHAIN.stages, *empty, CHAIN.stages[0]))
    limit = rotoff.min_mem_limit(chain, mode)
    assert rotoff.simulate(chain, rotoff.solve(chain, limit, mode=mode), limit).peak_bytes <= limit


@pytest.mark.parametrize("mode", MODES)
def test_huge_sizes_do_not_overflow(mode: str) -> None:
    """Petabytes, and limits exact to the byte; nothing here may be counted in 32 bits."""
    stages = tuple(Stage(f"s{i}", 1.0, 2.0, 2**50 + i, 2**51 + i) for i in range(3))
    chain = Chain(stages, 1e18, 1e18, input_bytes=3)
    limit = rotoff.min_mem_limit(chain, mode)
    assert rotoff.simulate(chain, rotoff.solve(chain, limit, mode=mode), limit).peak_bytes <= limit
    with pytest.raises(InfeasibleError):
        rotoff.solve(chain, limit - 1, mode=mode)


@pytest.mark.parametrize(
    "chain",
    [
        Chain((Stage("s", 1.0, 2.0, 2**57, 2**58),) * 6, 1e18, 1e18),
        Chain((Stage("s", 1.0, 2.0, 8, 8),), 1e18, 1e18, parameters=[ParameterGroup((1,), 2**60, 2**60, 2**62, 0.1)]),
    ],
    ids=["activations", "parameters"],
)
@pytest.mark.parametrize("mode", MODES)
def test_sizes_beyond_the_arithmetic_are_refused_in_a_sentence(mode: str, chain: Chain) -> None:
    sentence = r"values come to \d+ bytes .* planning takes at most 18014398509481984"
    for use in (
        lambda: rotoff.solve(chain, 2**59, mode=mode),
        lambda: rotoff.lower_bound(chain, 2**59),
        lambda: rotoff.min_mem_limit(chain, mode),
    ):
        with pytest.raises(ChainError, match=sentence):
            use()
    assert rotoff.simulate(chain, keep_all(chain)).peak_bytes > 2**60  # the machine itself has no such limit


def test_more_slots_than_the_arithmetic_holds() -> None:
    chain = Chain((Stage("s", 1.0, 2.0, 2**50, 2**51),) * 4, 1e18, 1e18)
    for mode in MODES:
        plan = rotoff.solve(chain, 2**53, mode=mode, mem_slots=100_000)
        assert rotoff.simulate(chain, plan, 2**53).peak_bytes > 2**52


@pytest.mark.parametrize("chain", [None, "chain.json", {"format": "rotoff.chain"}])
def test_what_is_no_chain_says_how_to_get_one(chain: Any) -> None:
    for use in (lambda: rotoff.solve(chain, 100), lambda: rotoff.simulate(chain, [])):
        with pytest.raises(ChainError, match=r"the chain is .* give a rotoff.Chain, such as Chain.load\(path\)"):
            use()


def test_a_model_in_place_of_a_chain_is_not_printed() -> None:
    class Model:
        def __repr__(self) -> str:
            return "Model(\n  (0): Linear\n)"

    with pytest.raises(ChainError, match=r"^the chain is a Model; give a rotoff.Chain") as caught:
        rotoff.solve(Model(), 100)  # type: ignore[arg-type]
    assert one_sentence(caught.value)


# -- extreme and wrong-typed values, each a sentence or a result


@pytest.mark.parametrize(
    ("bandwidth", "seconds"), [(1e20, 1.0), (1e30, 1.0), (1e308, 1e-3), (1e10, 1e300), (1e30, 1e300)]
)
def test_links_and_times_of_any_speed_are_planned_without_warnings(bandwidth: float, seconds: float) -> None:
    forms = (rotoff.Form(2 * 10**6, 3 * seconds),)
    stages = tuple(Stage("", seconds, 2 * seconds, 10**6, 3 * 10**6, forms=forms) for _ in range(6))
    chain = Chain(stages, bandwidth, bandwidth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rounding in ("up", "sums"):
            cost, _ = solve_slots(chain, 10 * 10**6, 10, rounding)
            assert cost >= chain.compute_time * (1 - 1e-9)


@pytest.mark.parametrize(("bandwidth", "seconds"), [(1e-300, 1e307), (1e-300, 1e300), (1e300, 1e307)])
def test_no_time_or_link_makes_a_warning(bandwidth: float, seconds: float) -> None:
    forms = (rotoff.Form(2 * 10**9, 2 * seconds),)
    stages = tuple(Stage("", seconds, 2 * seconds, 10**9, 3 * 10**9, forms=forms) for _ in range(3))
    chain = Chain(stages, bandwidth, bandwidth)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("joint", "remat"):
            limit = rotoff.min_mem_limit(chain, mode)
            assert rotoff.lower_bound(chain, limit) <= rotoff.solve(chain, limit, mode, refine=0.001).meta["makespan"]
        for policy in ("dynprog", "vdnn", "autoswap", "pofo"):
            with contextlib.suppress(rotoff.RotoffError):
                rotoff.solve(chain, 7 * 10**9, policy=policy)


@pytest.mark.parametrize("wrong", [None, "abc", 5])
def test_what_is_no_chain_is_refused(wrong: Any) -> None:
    for call in (keep_all, rotoff.sweep):
        with pytest.raises(ChainError, match="give a rotoff.Chain") as caught:
            call(wrong)
        assert one_sentence(caught.value)


@pytest.mark.parametrize("name", [None, 5, ["x"], {"a": 1}, "half a pair \ud800"])
def test_names_are_text(name: Any) -> None:
    with pytest.raises(ChainError, match="name of a stage is"):
        Stage(name, 1.0, 2.0, 10, 30)
    with pytest.raises(ChainError, match="name of the chain is"):
        replace(CHAIN, name=name)
    with pytest.raises(SequenceFormatError, match="the mode is"):
        rotoff.Sequence((), mode=name)


def test_what_is_no_sequence_of_things_is_refused() -> None:
    with pytest.raises(ChainError, match="forms of stage 'x' is 5"):
        Stage("x", 1.0, 2.0, 10, 30, forms=5)  # type: ignore[arg-type]
    with pytest.raises(ChainError, match="stages of the chain is 5"):
        Chain(5, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(rotoff.InvalidSequenceError, match="the sequence is None"):
        rotoff.simulate(CHAIN, None)  # type: ignore[arg-type]
    with pytest.raises(SequenceFormatError, match="the operations are 5"):
        rotoff.Sequence(5)  # type: ignore[arg-type]


NESTED = {
    "lists": "[" * 100_000,
    "lists, whole": "[" * 900 + "]" * 900,
    "objects": '{"a":' * 2000,
    "meta": '{"format": "%s", "version": 1, "meta": {"a": ' + "[" * 600 + "]" * 600 + "}}",
    "ops": '{"format": "%s", "version": 1, "stages": 1, "ops": ' + "[" * 101 + "]" * 101 + "}",
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_nested_files_say_so(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, error in ((Chain, ChainError), (rotoff.Sequence, SequenceFormatError)):
        path = tmp_path / "nested.json"
        path.write_text(text.replace("%s", f"rotoff.{kind.__name__.lower()}"))
        with pytest.raises(error, match=r"nested\.json is not JSON: it is nested more than 100 deep") as caught:
            kind.load(path)
        assert one_sentence(caught.value)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(ChainError, match="standard input is not JSON: it is nested more than 100 deep"):
        read_chain("-")


def test_what_is_nested_a_little_is_kept(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(90):
        deep = [deep]
    replace(CHAIN, meta={"deep": deep}).save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json").meta == {"deep": deep}


@pytest.mark.parametrize("limit", [np.array([178]), np.array([178.5]), -(10**5000)], ids=["1", "2", "3"])
def test_arrays_and_endless_negative_numbers_are_no_limits(limit: Any) -> None:
    with pytest.raises(LimitError) as caught:
        rotoff.solve(CHAIN, limit)
    assert one_sentence(caught.value)
    assert rotoff.solve(CHAIN, np.float64(250.5)).mem_limit == rotoff.solve(CHAIN, np.array(250)).mem_limit == 250


@pytest.mark.parametrize("form", [-1, 0, "1"])
def test_smaller_forms_count_from_1(form: Any) -> None:
    with pytest.raises(SequenceFormatError, match="a form one from 1"):
        rotoff.Op(rotoff.OpKind.F_SEL, 1, form)


def test_a_sequence_with_an_endless_limit_is_shown() -> None:
    endless = rotoff.Sequence.from_dict({**keep_all(CHAIN).to_dict(), "mem_limit": 10**400})
    assert "TiB" in rotoff.render(CHAIN, endless, width=80)


@pytest.mark.parametrize("repeats", [0, -1, 2.5, True])
def test_repeats_are_a_whole_number_of_at_least_one(repeats: object) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(rotoff.MeasureError, match=re.escape(f"repeats is {repeats!r}; give a whole number")):
        rotoff.Checkpointable(torch.nn.Linear(4, 4)).measure(torch.randn(2, 4), repeats=repeats)


@pytest.mark.slow
def test_measuring_and_training_import_no_compiler() -> None:
    """Importing ``torch._dynamo`` takes seconds; a dispatch mode does so unless it says that it need not."""
    program = """
import sys, torch, rotoff
from torch import nn
block = lambda: nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = block()
    def forward(self, x):
        return x + self.inner(x)
model, x = nn.Sequential(*[Block() for _ in range(4)]), torch.randn(256, 64)
wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
assert any(stage.forms for stage in wrapped.chain.stages)
wrapped.compute_sequence(int(0.6 * wrapped.keep_all_memory), mode="remat", refine=False)
wrapped(x).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(rotoff.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
