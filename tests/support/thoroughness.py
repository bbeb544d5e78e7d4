"""How much of what is random a run tries: `make test` a quarter, always the same one; `make test-all` all of it."""

from __future__ import annotations

import os

SHARE = 4 if os.environ.get("HYPOTHESIS_PROFILE", "default") == "default" else 1


def examples(count: int) -> object:
    """A decorator: so many examples of hypothesis."""
    from hypothesis import settings

    return settings(max_examples=-(-count // SHARE))


def seeds(count: int) -> range:
    return range(-(-count // SHARE))
