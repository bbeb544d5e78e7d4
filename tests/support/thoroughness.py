"""How much of what is random a run tries: `make test` a sixth, always the same one; `make test-all` all of it."""

from __future__ import annotations

import os

SHARE = 6 if os.environ.get("HYPOTHESIS_PROFILE", "default") == "default" else 1


def seeds(count: int) -> range:
    return range(-(-count // SHARE))


def examples(count: int):  # type: ignore[no-untyped-def]
    """That many of hypothesis; a sixth, but not fewer than eight, where a sixth is tried."""
    from hypothesis import settings

    return settings(max_examples=max(min(count, 8), len(seeds(count))))
