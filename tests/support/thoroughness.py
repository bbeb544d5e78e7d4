"""How much of what is random a run tries: `make test` a quarter, always the same one; `make test-all` all of it."""

from __future__ import annotations

import os

SHARE = 4 if os.environ.get("HYPOTHESIS_PROFILE", "default") == "default" else 1


def seeds(count: int) -> range:
    return range(-(-count // SHARE))


def examples(count: int):  # type: ignore[no-untyped-def]
    """That many of hypothesis; a quarter, but not fewer than ten, where a quarter is tried."""
    from hypothesis import settings

    return settings(max_examples=max(min(count, 10), len(seeds(count))))
