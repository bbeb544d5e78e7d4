"""A `device_limit` under FSDP2, in two processes on the CPU: bits of FSDP2 alone, one plan, the predicted peak."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ranks import printed  # noqa: E402

UPDATES = "after", "during"
FEW = ("uneven clipped after", "root plainly during")
# model, loop around the step, when parameters are updated; those of `tests/support/distributed_placed.py`
SPLIT = "split plainly after"  # FSDP2 of a tensor parallel model, in four processes
FURTHER = (
    SPLIT,
    *(f"{model} plainly {updates}" for model in ("adamw", "adapters", "frozen", "mixed", "unsharded") for updates in UPDATES),
    *(f"{model} plainly during" for model in ("momentum", "uneven", "skipping")),
    *(f"quantized plainly {updates}" for updates in UPDATES),
    *(f"{model} clipped after" for model in ("root", "foreach", "trainer")),
    *("copies plainly after", "hybrid plainly during"),
    *("adamw accumulated after", "adamw evaluated during", "adamw synced_last after"),
    "root gathered_throughout after",
    *("mixed synced_last during", "root checkpointed during"),
)  # fmt: skip


REFUSED = "2 distributed_failures refused"
ENDED = {row: f"2 distributed_placed ended {row}" for row in ("1 forward after", "0 backward during")}
CASES = (*(f"2 distributed_placed {row}" for row in FEW), REFUSED, ENDED["0 backward during"])
SHARD = (
    "OptionError: device_limit in several processes is for parameters that FSDP2 shards: call fully_shard on every block"
    " and on the Checkpointable before compute_sequence (with a mesh of (processes, 1), each has a whole copy, as with"
    " DDP); for tensor parallel models give a mem_limit"
)


def said_in(case: str) -> list[str]:
    return printed(*(CASES if case in CASES else [case]))[case]


@pytest.mark.parametrize("row", [*FEW, *(pytest.param(row, marks=pytest.mark.slow) for row in FURTHER)])
def test_training_is_that_of_fsdp2_alone(row: str) -> None:
    said = said_in(f"{4 if row == SPLIT else 2} distributed_placed {row}")
    assert said[0] == "equal=True same_plan=True within=True close=True moves=True", said


@pytest.mark.parametrize(
    ("what", "sentences"),
    [
        ("whole", (SHARD, SHARD)),
        ("root_not_sharded", (SHARD, SHARD)),
        ("without_group", ("OptionError: device_limit with FSDP2 needs one plan for all processes;",) * 2),
        ("in_one", ("LimitError: process 1 of the group could not", "OptionError: device_limit needs the optimizer")),
        ("too_small", ("InfeasibleError: the training step with its parameters, gradients",) * 2),
        ("kept_gathered", ("ExecutionError: FSDP2 holds whole parameters from before this update",) * 2),
        ("after_a_failure", ("ExecutionError: an earlier backward failed, after which FSDP2",) * 2),
    ],
)
def test_what_is_refused_is_one_sentence_in_all_processes(what: str, sentences: tuple[str, str]) -> None:
    said = said_in(REFUSED)
    for rank, sentence in enumerate(sentences):
        assert any(line.startswith(f"{what} {rank}: {sentence}") for line in said), said


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[] if case in CASES else pytest.mark.slow) for row, case in ENDED.items()]
)
def test_a_process_that_ends_is_named_by_the_others(row: str) -> None:
    (said,) = said_in(ENDED[row])
    ends, _, updates = row.split()
    assert said.startswith(
        f"ExecutionError a collective of this step has failed (process {ends} of the group has ended)"
    )
    assert ("a backward that updates parameters ended early; of the parameters of" in said) == (updates == "during")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["made", "recorded", "planned"])
def test_a_process_whose_disk_is_full_is_named_by_the_others(when: str) -> None:
    said = sorted(said_in(f"2 distributed_placed full {when}"))
    assert "process 1 of the group" in said[0], said
    assert said[1].startswith("1: ExecutionError: ") and "in the offload directory" in said[1], said
