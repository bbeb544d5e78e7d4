"""Two processes on the CPU: gradients under DDP and FSDP2 are those of the plain model there, and all follow one
plan."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import rotoff

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from models import ALL  # noqa: E402
from ranks import printed  # noqa: E402

pytestmark = pytest.mark.early
FEW = ["mlp"]
ROOTS = (
    *("root", "root_resharded", "root_unsharded"),  # with parameters of their own
    *("root_alone", "root_alone_small"),  # and no block is sharded; small: a root larger than all that a step makes
)
STEPS = {kind: f"2 distributed_steps {kind}" for kind in ("ddp", "fsdp", *ROOTS)}
FAILURES = "2 distributed_failures agreed"
UNEQUAL = f"2 distributed_unequal {' '.join(FEW)}"
ROOM = "2 distributed_room"
AHEAD = "2 distributed_placed gathered_ahead"
TENSOR = "distributed_tensor_parallel tensor"
SPLIT = [  # the first one in each run; FSDP2 of what is tensor parallel takes four processes
    f"2 {TENSOR} joint",
    f"4 {TENSOR} joint",
    f"2 {TENSOR} remat offload",
    "2 distributed_tensor_parallel sequence remat",
    "2 distributed_tensor_parallel sequence joint offload",
    f"4 {TENSOR} remat offload",
]
OWN = ("gather", "functional", "ring", "context", "reduced_later", "gathered", "exchanged")  # in the model's own code
COLLECTIVES = [f"2 distributed_collectives {kind} {mode}" for kind in OWN for mode in ("remat", "offload")]
FAST = SPLIT[0], *(f"2 distributed_collectives {one}" for one in ("gather remat", "ring offload", "exchanged remat"))
ALONE = {kind: f"2 distributed_collectives {kind}" for kind in ("alone", "context_alone")}
CASES = (*STEPS.values(), FAILURES, UNEQUAL, ROOM, AHEAD, *FAST, *ALONE.values())


def said_in(case: str) -> list[str]:
    return printed(*(CASES if case in CASES else [case]))[case]


def each(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Of each run those that are fast; slowly, the others, too."""
    marked = [pytest.param(case, marks=[] if case in CASES else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize("case", marked)


@pytest.mark.parametrize("kind", STEPS)
def test_gradients_are_those_of_the_plain_model_and_all_processes_follow_one_plan(kind: str) -> None:
    said = printed(*CASES)[STEPS[kind]]
    for mode in ("joint", "remat", *(["offload"] if kind != "root_alone_small" else [])):  # there it needs no less
        (line,) = (line for line in said if line.startswith(f"{mode}: equal=True same_plan=True works=True"))
        assert "within=True" in line, said
    # a plan, which depends on times, may be one whose first run is charged with more than it holds
    assert any("close=True" in line for line in said) or kind not in ROOTS, said


def test_micro_batches_in_flight_share_what_fsdp2_has_gathered() -> None:
    said = printed(*CASES)[STEPS["root_unsharded"]]
    assert said.count("two in flight: within=True close=True") == 2, said  # one of them keeps everything


def test_moves_count_what_fsdp2_gathers_for_the_next_block() -> None:
    said = said_in(AHEAD)
    assert said[0] == "within=True close=True works=True", said


@each(SPLIT)
def test_tensor_parallel_models_train_as_without_rotoff_by_one_plan(case: str) -> None:
    said = said_in(case)
    for mode in case.split()[3:]:
        assert f"{mode}: equal=True same_plan=True works=True stages=True" in said
    assert "bytes of shards: True" in said
    for what in ("alone", "sharded result"):
        assert f"{what}: equal=True" in said


@each(COLLECTIVES)
def test_models_that_communicate_in_their_own_code_train_as_without_rotoff(case: str) -> None:
    said = said_in(case)
    assert f"{case.split()[-1]}: equal=True works=True" in said


@pytest.mark.parametrize("kind", ALONE)
def test_models_that_communicate_need_no_common_plan(kind: str) -> None:
    """Nothing that communicates runs again: one process recomputes, the other one moves."""
    said = printed(*CASES)[ALONE[kind]]
    assert {"remat: equal=True works=True", "offload: equal=True works=True"} <= set(said)


SAYS = "sample", "measure", "forward", "later", "limit", "small", "plan", "other"
LINK = "copies at once", "one link"  # as in training, where each has its part of what the host can do


def test_what_processes_have_in_common_and_what_one_may_ask_alone() -> None:
    said = printed(*CASES)[ROOM]
    assert "shown before: refused refused" in said, said  # one process alone would wait for the others
    assert "unlike: refused refused" in said, said  # models with other numbers of stages
    for what in ("shown after", "same bytes", "expected", *LINK):
        assert f"{what}: True True" in said, said


def test_a_failure_in_one_process_is_one_sentence_in_all() -> None:
    """Nobody waits for a process that does not come, and the next step works."""
    said = dict(line.split(": ", 1) for line in said_in(FAILURES) if ": " in line)
    for failing, other in ((0, 1), (1, 0)):
        own, theirs = ({what: said[f"{what} {failing} {rank}"] for what in SAYS} for rank in (failing, other))
        could_not = f"MeasureError: process {failing} of the group could not"
        assert own["sample"].startswith("MeasureError")
        assert theirs["sample"].startswith(f"{could_not} take the sample, and so none of them can; there: Measure")
        for what in ("measure", "forward"):
            assert own[what].startswith("OutOfMemoryError: injected")
            assert theirs[what].startswith(f"{could_not} measure the model, and so none of them can")
            assert theirs[what].endswith("there: OutOfMemoryError: injected")
        assert own["later"] == theirs["later"] == "nothing"
        assert own["limit"].startswith("LimitError: mem_limit is -5, but must be above 0")
        assert theirs["limit"].startswith(f"LimitError: process {failing} of the group could not take the limit")
        assert own["small"] == theirs["small"] and "needs at least" in own["small"]
        # the first process plans alone, and decides in the mode that it was given
        assert own["plan"] == ("nothing" if failing else "ArithmeticError: injected")
        first = "MeasureError: the first process of the group could not plan: ArithmeticError"
        assert theirs["plan"].startswith("nothing" if failing else first)
        assert own["other"] == theirs["other"] and f"in mode {'offload' if failing else 'remat'}" in own["other"]


REST = f"2 distributed_unequal {' '.join(name for name in ALL if name not in FEW)}"


@pytest.mark.parametrize("case", [UNEQUAL, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "rest"])
def test_processes_with_unequal_batches_do_the_same_under_every_limit(case: str) -> None:
    """Also where everything fits in one of them alone; and what is charged covers both."""
    said = [line for line in said_in(case) if "; " in line]
    names = case.split()[2:]
    assert len(said) == 2 * len(names)
    assert all(line.endswith("; alike") for line in said), said
    assert not any("'kept': 0" in line for line in said), said
    assert not any("'worked': 0" in line for line in said), said


def test_a_process_group_that_is_not_there() -> None:
    with pytest.raises(rotoff.OptionError, match="init_process_group"):
        rotoff.Checkpointable(torch.nn.Sequential(torch.nn.Linear(2, 2)), process_group=True)
