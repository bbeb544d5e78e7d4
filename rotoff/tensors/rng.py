"""States of the random number generators that a step draws from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..accelerator import generator_of


class Generators:
    """Those of the CPU and of `device`, from which a step may draw."""

    def __init__(self, device: torch.device) -> None:
        own = generator_of(device)
        self._own = [torch.default_generator] + ([] if own is None else [own])

    def copies(self) -> list[torch.Generator]:
        """Return copies of the generators in their present states; they allocate no tensors."""
        return [generator.clone_state() for generator in self._own]

    def put(self, copies: Sequence[torch.Generator]) -> None:
        for generator, copy in zip(self._own, copies, strict=True):
            generator.set_state(copy.get_state())


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
