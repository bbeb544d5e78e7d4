"""Paths that users name in options."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import rotoff

BAD_DIRECTORIES: list[Any] = ["a\0b", "~nobody-here", "~nobody-here/file", "half a pair \ud800", b"file"]


@pytest.mark.parametrize("given", BAD_DIRECTORIES, ids=repr)
def test_what_names_no_directory(given: Any) -> None:
    with pytest.raises(rotoff.OptionError, match="host_directory is .*; give the path of a directory"):
        rotoff.Checkpointable(nn.Linear(2, 2), host_directory=given)
