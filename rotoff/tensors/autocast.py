"""Autocast around what is measured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Autocast's cache of weights is off within: a run does the same operations whatever ran before it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
