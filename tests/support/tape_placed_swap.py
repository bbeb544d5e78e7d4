"""A plugin of pytest: ``-p tape_placed_swap`` runs tests of a `device_limit` with steps on tapes."""

from __future__ import annotations

import pytest
from tape_placed_model import Placed, force

import rotoff

rotoff.Checkpointable = Placed  # type: ignore[assignment,misc]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = item.module  # type: ignore[attr-defined]
        if hasattr(module, "force"):
            module.force = force
