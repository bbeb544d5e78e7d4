"""Models that change between steps train to the bits of the plain model, or are refused in a sentence: a table, row by
row."""

from __future__ import annotations

import pytest
from changing_models import TABLE
from odd_models import ODD
from step_by_step import MODES, Row, is_right, verdict

ROWS = [*TABLE, *ODD]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "in the other modes"])
def test_what_changes_between_steps_is_followed_or_refused(row: Row, other: bool) -> None:
    modes = [mode for n, mode in enumerate(MODES) if (n != ROWS.index(row) % len(MODES)) == other]
    said = {mode: verdict(row, mode) for mode in modes}
    assert all(is_right(row, one) for one in said.values()), said


def test_names_tell_rows_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
