"""States of the random number generators that a step draws from."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import string_at

import torch

RNG_BYTES = 5056  # of the CPU generator's state; a CUDA generator's is 16 bytes of host memory


States = tuple[bytes, ...]  # of generators


_PROBE = threading.local()


def _next_numbers(generator: torch.Generator) -> list[float]:
    """What `generator` would give next; takes no bytes of the step's."""
    if not hasattr(_PROBE, "numbers"):
        _PROBE.numbers = torch.empty(2, dtype=torch.float64)
    return _PROBE.numbers.uniform_(generator=generator.clone_state()).tolist()


class Generators:
    """The states of the generators that a stage on `device` may draw from: the CPU's and the device's own."""

    def __init__(self, device: torch.device) -> None:
        self._own = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._own.append(torch.cuda.default_generators[index])
        self._last: States = ()

    def states(self) -> States:
        """The present states; the same object as at the last call where nothing was drawn since."""
        now = tuple([generator.get_state() for generator in self._own])
        # sooner than through NumPy; bytes compare several times faster than tensors of this size
        content = tuple([string_at(state.data_ptr(), state.numel()) for state in now])
        if content != self._last:
            self._last = content
        return self._last

    def copies(self) -> list[torch.Generator]:
        """Generators in the present states; these take nothing from the allocator of tensors."""
        return [generator.clone_state() for generator in self._own]

    def mark(self, copies: Sequence[torch.Generator] | None = None) -> tuple[object, ...]:
        """What tells the present states, or those of `copies`, from others; of the CPU's the next numbers, since its
        state is large."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return ()  # nothing is drawn
        own = self._own if copies is None else copies
        return *_next_numbers(own[0]), *(bytes(copy.get_state().tolist()) for copy in own[1:])

    def put(self, copies: Sequence[torch.Generator]) -> None:
        for generator, copy in zip(self._own, copies, strict=True):
            generator.set_state(copy.get_state())

    def begin(self) -> list[torch.Generator]:
        """`copies`, for a run that will be repeated from them.

        They are put back at once on CUDA, since that draws more than it changes: cuDNN's recurrent layers take their
        dropout from a buffer of their own that goes on from run to run, and is filled anew, by the generator, in the
        first run after its state was put (`get_dropout_state` in PyTorch's cudnn/RNN.cpp). Every repetition puts it, so
        the first run must find it put too.
        """
        copies = self.copies()
        for n in range(1, len(copies)):
            self._own[n].set_state(copies[n].get_state())
        return copies
