"""What the bounds pay for a second of the link."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def link_price(p: np.ndarray, r: np.ndarray, shares: Iterable[float]) -> np.ndarray:
    """What a second of the link is worth at most: out, in, or its shares of both."""
    out, back = shares
    return np.maximum(np.maximum(p, r), out * p + back * r)
