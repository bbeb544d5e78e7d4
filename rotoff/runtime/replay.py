"""A replay sees what the first run saw, and leaves no trace.

Before its first run a stage that will run again notes the random number generators, the buffers that its forward changes
and the autocast state; a replay runs on those and puts everything back after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

RNG_BYTES = 5056  # of the CPU generator's state; a CUDA generator's is 16 bytes of host memory


class Generators:
    """The states of the generators that a stage on `device` may draw from: the CPU's and the device's own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: tuple[torch.Tensor, ...] = ()
        self._content: tuple[bytes, ...] = ()  # of those; bytes compare several times faster than tensors of this size

    def states(self) -> tuple[torch.Tensor, ...]:
        """The present states; the same object as at the last call where nothing was drawn since, to save bytes."""
        now = self.read()
        content = tuple(state.numpy().tobytes() for state in now)
        if content != self._content:
            self._last, self._content = now, content
        return self._last

    def read(self) -> tuple[torch.Tensor, ...]:
        cpu = torch.get_rng_state()
        return (cpu, torch.cuda.get_rng_state(self.device)) if self.device.type == "cuda" else (cpu,)

    def put(self, states: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)


class ReplayState:
    """What one stage's first run saw.

    Args:
        generators: of the step. buffers: (module, name) of every buffer that the stage's forward changes.
    """

    def __init__(self, generators: Generators, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        self._generators = generators
        self._rng = generators.states()
        self._buffers = [(module, name, _buffer(module, name).clone()) for module, name in buffers]
        self._autocast = [_autocast_state(device_type) for device_type in sorted({"cpu", generators.device.type})]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, everything is as before the first run; after, as it was."""
        rng = self._generators.read()
        own = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        try:
            # clones, since the run changes them and another replay may follow
            _put_buffers([(module, name, saved.clone()) for module, name, saved in self._buffers])
            self._generators.put(self._rng)
            with self._autocast_as_then(), torch.enable_grad():
                yield
        finally:
            _put_buffers(own)
            self._generators.put(rng)

    def _autocast_as_then(self) -> AbstractContextManager[Any]:
        if all(state == _autocast_state(state[0]) for state in self._autocast):
            return nullcontext()
        stack = ExitStack()
        for device_type, enabled, dtype, cache_enabled in self._autocast:
            stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled))
        return stack


def _buffer(module: nn.Module, name: str) -> torch.Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer.detach()


def _put_buffers(buffers: Sequence[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def _autocast_state(device_type: str) -> tuple[str, bool, torch.dtype, bool]:
    cache = torch.is_autocast_cache_enabled()
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type), cache


@contextmanager
def preserved(buffers: Sequence[tuple[nn.Module, str, torch.Tensor]], device: torch.device) -> Iterator[None]:
    """Generators and `buffers` are after the block what they were before it, in place, whatever ran within."""
    generators = Generators(device)
    rng = generators.states()
    saved = [(module, name, buffer, buffer.detach().clone()) for module, name, buffer in buffers]
    try:
        yield
    finally:
        generators.put(rng)
        with torch.no_grad():
            for module, name, buffer, content in saved:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
                module._buffers[name] = buffer
