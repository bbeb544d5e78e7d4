"""Autocast around what is measured and planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def in_region() -> bool:
    """Return whether an autocast region is open, even one that is switched off: regions within it keep their casts of
    weights until it is left."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


@contextmanager
def casts_dropped() -> Iterator[None]:
    """Empty autocast's cache of weights after the block: the casts in it are older than the graph of a step that would
    use them, and autograd adds gradients up in the order of age."""
    try:
        yield
    finally:
        torch.clear_autocast_cache()
