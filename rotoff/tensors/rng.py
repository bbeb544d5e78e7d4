"""States of the random number generators that a step draws from."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from ctypes import string_at
from typing import Any

import numpy as np
import torch

from ..accelerator import generator_of

RNG_BYTES = 5056  # of the CPU generator's state; a CUDA generator's is 16 bytes of host memory


States = tuple[bytes, ...]  # of generators


_PROBE = threading.local()


def _next_numbers(generator: torch.Generator) -> list[float]:
    """Return the next two numbers of `generator`, without advancing it or taking bytes that a step would count."""
    if not hasattr(_PROBE, "numbers"):
        _PROBE.numbers = torch.empty(2, dtype=torch.float64, device="cpu")
    return _PROBE.numbers.uniform_(generator=generator.clone_state()).tolist()


class Generators:
    """The states of the generators that a stage on `device` may draw from: the CPU's and the device's own."""

    def __init__(self, device: torch.device) -> None:
        own = generator_of(device)
        self._own = [torch.default_generator] + ([] if own is None else [own])
        self._last: States = ()

    def states(self) -> States:
        """Return the present states; the same object as in the last call if nothing was drawn since."""
        now = tuple([generator.get_state() for generator in self._own])
        # faster than through NumPy; bytes compare several times faster than tensors of this size
        content = tuple([string_at(state.data_ptr(), state.numel()) for state in now])
        if content != self._last:
            self._last = content
        return self._last

    def copies(self) -> list[torch.Generator]:
        """Return copies of the generators in their present states; they allocate no tensors."""
        return [generator.clone_state() for generator in self._own]

    def mark(self, copies: Sequence[torch.Generator] | None = None) -> tuple[object, ...]:
        """Return a key that identifies the present states, or those of `copies`; for the CPU, whose state is large, the
        next numbers."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return ()  # nothing is drawn
        own = self._own if copies is None else copies
        return *_next_numbers(own[0]), *(bytes(copy.get_state().tolist()) for copy in own[1:])

    def put(self, copies: Sequence[torch.Generator]) -> None:
        for generator, copy in zip(self._own, copies, strict=True):
            generator.set_state(copy.get_state())

    def begin(self) -> list[torch.Generator]:
        """Return `copies` for a run that will be repeated from them.

        On CUDA this also sets the generators to these states. cuDNN's recurrent layers take their dropout from a buffer
        of their own, which continues from run to run and is filled anew in the first run after the generator's state
        was set (`get_dropout_state` in PyTorch's cudnn/RNN.cpp). Every repetition sets it, so the first run must, too.
        """
        copies = self.copies()
        for n in range(1, len(copies)):
            self._own[n].set_state(copies[n].get_state())
        return copies


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
