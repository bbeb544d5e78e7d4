"""Autocast around what is measured and planned."""

from __future__ import annotations

import torch


def in_region() -> bool:
    """Return whether an autocast region is open, even one that is switched off: regions within it keep their casts of
    weights until it is left."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
