"""What people get wrong when they ask for a plan: one clear sentence and a typed error each, or the right result."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable
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
from rotoff.solver import keep_all

MODES = ("joint", "remat", "offload")
CHAIN = Chain(tuple(Stage(f"s{i}", 1.0, 2.0, 10 * i, 30 * i) for i in (1, 2, 3)), 50.0, 50.0, input_bytes=10)


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return 20 <= len(text) <= 300 and "\n" not in text


# -- what is refused, in a sentence

Ask = Callable[[Any], object]


def stage(**options: Any) -> Stage:
    return Stage(
        **{"name": "x", "forward_time": 1.0, "backward_time": 2.0, "output_bytes": 10, "saved_bytes": 30} | options
    )


SOLVE: Ask = lambda v: rotoff.solve(CHAIN, v)  # noqa: E731
BOUND: Ask = lambda v: rotoff.lower_bound(CHAIN, v)  # noqa: E731
LIMIT: tuple[Ask, ...] = (SOLVE, BOUND, lambda v: rotoff.simulate(CHAIN, [], v))
MODE: tuple[Ask, ...] = (
    lambda v: rotoff.solve(CHAIN, 200, mode=v),
    lambda v: rotoff.min_mem_limit(CHAIN, v),
    lambda v: rotoff.lower_bound(CHAIN, 200, mode=v),
)
UPDATES: tuple[Ask, ...] = (
    lambda v: rotoff.solve(CHAIN, 200, updates=v),
    lambda v: rotoff.simulate(CHAIN, [], updates=v),
    lambda v: rotoff.lower_bound(CHAIN, 200, updates=v),
)


class Model:
    def __repr__(self) -> str:
        return "Model(\n  (0): Linear\n)"


OF_CHAIN: tuple[Ask, ...] = (
    lambda v: rotoff.solve(v, 100),
    lambda v: rotoff.simulate(v, []),
    lambda v: rotoff.lower_bound(v, 200),
    lambda v: rotoff.min_mem_limit(v, "joint"),
    keep_all,
    rotoff.sweep,
)
REFUSED: list[tuple[type[Exception], str, tuple[Ask, ...], list[Any]]] = [  # by each of the calls, each of the values
    (LimitError, "^mem_limit is .* must be above 0", LIMIT, [0, -1]),
    (LimitError, "^mem_limit is VALUE", LIMIT, [math.nan, math.inf, True, "", "most of it"]),
    (LimitError, "^mem_limit is VALUE", (SOLVE, BOUND), [None]),
    (LimitError, "^mem_limit is .* looks like a fraction", LIMIT, [0.5]),
    (LimitError, "^mem_limit is .* unknown unit 'GiBs'", LIMIT, ["6 GiBs"]),
    (LimitError, ".", (SOLVE,), [np.array([178]), np.array([178.5])]),
    (OptionError, "mode is VALUE; modes are 'joint', 'remat', 'offload'", MODE, ["", "Joint", "checkpoint", "keep-all", None, 3, ["joint"]]),
    (OptionError, "mem_slots", tuple(lambda v, m=mode: rotoff.solve(CHAIN, 200, m, mem_slots=v) for mode in MODES)
     + (lambda v: rotoff.sweep(CHAIN, [300], mem_slots=v),),
     [0, -1, 1.5, math.nan, True, None, "50"]),
    (OptionError, ".", (lambda v: rotoff.sweep(CHAIN, [100], v),), [(), ("both",)]),
    (OptionError, "updates is VALUE; give 'during' or 'after'", UPDATES, ["later"]),
    (ChainError, "^the chain is a Model; give a rotoff.Chain", OF_CHAIN, [Model()]),
    (ChainError, r"the chain is .* give a rotoff.Chain, such as Chain.load\(path\)", OF_CHAIN,
     [None, "chain.json", 5, {"format": "rotoff.chain"}]),
    (ChainError, "name of a stage is", (lambda v: stage(name=v),), [None, 5, ["x"], {"a": 1}, "half a pair \ud800"]),
    (ChainError, "name of the chain is", (lambda v: replace(CHAIN, name=v),), [None, 5, ["x"], "half a pair \ud800"]),
    (ChainError, "forms of stage 'x' is 5", (lambda v: stage(forms=v),), [5]),
    (ChainError, "form 1 of stage 'x' is 3, not a rotoff.Form", (lambda v: stage(forms=v),), [(3,)]),
    (ChainError, "stages of the chain is 5", (lambda v: Chain(v, 1.0, 1.0),), [5]),
    (ChainError, "no stages", (lambda v: Chain(v, 1.0, 1.0),), [()]),
    (ChainError, "not a rotoff.Stage", (lambda v: Chain(v, 1.0, 1.0),), [[{"forward_time": 1.0}]]),
    (ChainError, "d2h_bidirectional_bandwidth of the chain is", (lambda v: replace(CHAIN, d2h_bidirectional_bandwidth=v),), [51.0]),
    (ChainError, "h2d_bidirectional_bandwidth of the chain is", (lambda v: replace(CHAIN, h2d_bidirectional_bandwidth=v),), [0.0, "a"]),
    (SequenceFormatError, "the mode is", (lambda v: rotoff.Sequence((), mode=v),), [None, 5, ["x"], "half a pair \ud800"]),
    (SequenceFormatError, "the operations are 5", (rotoff.Sequence,), [5]),
    (SequenceFormatError, "a form one from 1", (lambda v: rotoff.Op(rotoff.OpKind.F_SEL, 1, v),), [-1, 0, "1"]),
    (rotoff.InvalidSequenceError, "the sequence is None", (lambda v: rotoff.simulate(CHAIN, v),), [None]),
    (rotoff.InvalidSequenceError, r"op 0 \(F_all 1\): is not a rotoff.Op; make one with rotoff.parse",
     (lambda v: rotoff.simulate(CHAIN, v),), [["F_all 1", "F_all 2"]]),
]  # fmt: skip


@pytest.mark.parametrize(("error", "sentence", "asks", "values"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_is_refused(error: type[Exception], sentence: str, asks: tuple[Ask, ...], values: list[Any]) -> None:
    for ask, value in itertools.product(asks, values):
        with pytest.raises(error, match=sentence.replace("VALUE", re.escape(repr(value)))) as caught:
            ask(value)
        assert one_sentence(caught.value), (str(caught.value), value)


def test_text_of_any_length_is_refused_as_an_operation() -> None:
    with pytest.raises(SequenceFormatError, match="is not an operation"):
        rotoff.parse("F_all " + "1" * 5000)


def test_limits_may_be_numbers_of_numpy_and_none_of_any_length_below_zero() -> None:
    with pytest.raises(LimitError) as caught:
        rotoff.solve(CHAIN, -(10**5000))
    assert one_sentence(caught.value)
    assert rotoff.solve(CHAIN, np.float64(250.5)).mem_limit == rotoff.solve(CHAIN, np.array(250)).mem_limit == 250


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_few_slots_still_give_a_plan(slots: int, mode: str) -> None:
    limit = rotoff.min_mem_limit(CHAIN, mode)
    sequence = rotoff.solve(CHAIN, limit, mode=mode, mem_slots=slots)
    assert rotoff.simulate(CHAIN, sequence, limit).peak_bytes <= limit


def test_a_bound_at_more_bytes_than_a_float_holds_is_that_of_plenty() -> None:
    assert rotoff.lower_bound(CHAIN, 10**400) == rotoff.lower_bound(CHAIN, 10**12) == CHAIN.compute_time
    placed = replace(CHAIN, parameters=(rotoff.ParameterGroup((1,), 5, 5, 10, update_time=0.5),))
    assert rotoff.lower_bound(placed, 10**400) == pytest.approx(placed.compute_time + 0.5)


# -- limits as people write them


@pytest.mark.parametrize("limit", [200, 200.9, "200", "200 B", "0.2 kB"])
def test_all_ways_to_write_a_limit_give_the_same_plan(limit: Any) -> None:
    sequence = rotoff.solve(CHAIN, limit)
    assert sequence.mem_limit == 200
    assert sequence == rotoff.solve(CHAIN, 200)


# -- chains at the edge


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


# -- extreme and wrong-typed values, each a sentence or a result


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


NESTED = {
    "lists": "[" * 100_000,
    "lists, whole": "[" * 900 + "]" * 900,
    "objects": '{"a":' * 2000,
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_nested_files_say_so(text: str, tmp_path: Path) -> None:
    for kind, error in ((Chain, ChainError), (rotoff.Sequence, SequenceFormatError)):
        path = tmp_path / "nested.json"
        path.write_text(text)
        with pytest.raises(error, match=r"nested\.json") as caught:
            kind.load(path)
        assert one_sentence(caught.value)


def test_what_is_nested_is_kept(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    replace(CHAIN, meta={"deep": deep}).save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json").meta == {"deep": deep}


def test_a_sequence_with_an_endless_limit_is_shown() -> None:
    endless = rotoff.Sequence.from_dict({**keep_all(CHAIN).to_dict(), "mem_limit": 10**400})
    assert "TiB" in rotoff.render(CHAIN, endless, width=80)
