"""States of the random number generators of Python and NumPy, from which a step may draw."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def other_generators() -> tuple[Any, Any]:
    """Return the states of Python's generator and NumPy's."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return random.getstate(), (kind, keys.tobytes(), *rest)


def put_other_generators(states: tuple[Any, Any]) -> None:
    """Restore `states` from `other_generators`."""
    random.setstate(states[0])
    kind, keys, *rest = states[1]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
