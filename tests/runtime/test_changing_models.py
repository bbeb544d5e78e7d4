"""Models that change between steps train to the bits of the plain model, or are refused in a sentence: a table, row by
row."""

from __future__ import annotations

from typing import Any

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
from step_by_step import MODES, Row, is_right, verdict
from trunks import TABLE
from whole_models import UNSEEN


def cases() -> list[Any]:
    """Every third row in one of the modes; slowly, the others, too, and each in the other modes. In joint, after others,
    the first step measures."""
    found = []
    for n, row in enumerate([*TABLE, *UNSEEN]):
        one = MODES[n // 3 % len(MODES)]
        others = [mode for mode in MODES if mode == "joint" or mode != one]
        found.append(pytest.param(row, [one], id=row.name, marks=[pytest.mark.slow] if n % 3 else []))
        found.append(pytest.param(row, others, id=f"{row.name}, in the other modes", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("row", "modes"), cases())
def test_what_changes_between_steps_is_followed_or_refused(row: Row, modes: list[str]) -> None:
    said = {mode: verdict(row, mode) for mode in modes}
    assert all(is_right(row, one) for one in said.values()), said


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in [*TABLE, *UNSEEN]}) == len(TABLE) + len(UNSEEN)
