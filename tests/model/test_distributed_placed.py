"""A `device_limit` under FSDP2, in two processes on the CPU: bits of FSDP2 alone, one plan, the predicted peak."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ranks import printed  # noqa: E402

FEW = ("uneven clipped after", "root plainly during")
# model, loop around the step, when parameters are updated; those of `tests/support/distributed_placed.py`
FURTHER = (
    "adamw plainly after",
    "adamw plainly during",
    "momentum plainly during",
    "uneven plainly during",
    "root clipped after",
    "adapters plainly after",
    "adapters plainly during",
    "frozen plainly after",
    "frozen plainly during",
    "mixed plainly after",
    "mixed plainly during",
    "unsharded plainly after",
    "unsharded plainly during",
    "foreach clipped after",
    "adamw accumulated after",
    "adamw evaluated during",
)


def case(row: str) -> str:
    return f"2 distributed_placed {row}"


@pytest.mark.parametrize("row", [*FEW, *(pytest.param(row, marks=pytest.mark.slow) for row in FURTHER)])
def test_training_is_that_of_fsdp2_alone(row: str) -> None:
    rows = FEW if row in FEW else (row,)
    said = printed(*map(case, rows))[case(row)]
    assert said[0] == "equal=True same_plan=True within=True close=True moves=True", said
