"""Models that change between steps train to the bits of the plain model, or are refused in a sentence: a table, row by
row."""

from __future__ import annotations

import changing_models  # noqa: F401 - fills the table
import odd_models  # noqa: F401
import pytest
from step_by_step import MODES, Row, is_right, verdict
from trunks import TABLE
from whole_models import UNSEEN

ROWS = [*TABLE, *UNSEEN]
CASES = [  # every third row in one of the modes; slowly, all in each
    pytest.param(
        row, mode, id=f"{row.name}, {mode}", marks=[pytest.mark.slow] if n % 3 or mode != MODES[n // 3 % 3] else []
    )
    for n, row in enumerate(ROWS)
    for mode in MODES
]


@pytest.mark.parametrize(("row", "mode"), CASES)
def test_what_changes_between_steps_is_followed_or_refused(row: Row, mode: str) -> None:
    said = verdict(row, mode)
    assert is_right(row, said), said


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
