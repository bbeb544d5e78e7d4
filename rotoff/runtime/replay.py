"""A replay sees what the first run saw, and leaves no trace.

Before its first run a stage that will run again notes the random number generators, the buffers that its forward
changes and the autocast state; a replay runs on those and puts everything back after.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..tensors.buffers import restorable
from ..tensors.rng import Generators
from ..tensors.stage import TRAINING

_Attribute = tuple[dict[str, Any], str, Any]  # (where it is held, its name, its value)
AutocastState = tuple[bool, list[tuple[str, bool, torch.dtype]]]


class Surroundings:
    """All around a stage that its forward may depend on: generators, and autocast for the CPU and `device`'s type."""

    def __init__(self, device: torch.device) -> None:
        self.generators = Generators(device)
        self._device_types = sorted({"cpu", device.type})
        cache_enabled, states = self._read_autocast()
        self._off: AutocastState = cache_enabled, [(kind, False, dtype) for kind, _, dtype in states]

    def autocast(self) -> AutocastState:
        """Whether casts of weights are kept; for each type of device, whether autocast is on and what it casts to."""
        return self._read_autocast() if torch._C._is_any_autocast_enabled() else self._off

    def _read_autocast(self) -> AutocastState:
        kinds = self._device_types
        states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return torch.is_autocast_cache_enabled(), states


class ReplayState:
    """What one stage's first run saw. Within ``with`` everything is as it was before that run; after, as it was
    outside.

    Args:
        surroundings: of the step. buffers: (module, name) of every buffer that the stage's forward changes. attributes:
            likewise, of every attribute that it sets, with its bytes. modes: what was measured (`StageModule.modes`),
            and so what that run saw; a GAN thaws its discriminator before the backward of the generator's loss.
    """

    __slots__ = ("_attributes", "_autocast", "_buffers", "_modes", "_outside", "_rng", "_surroundings")

    def __init__(
        self,
        surroundings: Surroundings,
        buffers: Sequence[tuple[nn.Module, str]],
        attributes: Sequence[tuple[nn.Module, str, int]] = (),
        modes: Sequence[tuple[nn.Module, str, bool]] = (),
    ) -> None:
        self._modes = modes
        self._attributes: list[_Attribute] = [
            (vars(module), name, vars(module)[name])
            for module, name, _ in attributes
            if restorable(vars(module).get(name))
        ]
        self._surroundings = surroundings
        self._rng = surroundings.generators.begin()
        self._buffers = [(module, name, _buffer(module, name).clone()) for module, name in buffers]
        self._autocast = surroundings.autocast()
        self._outside: _Outside | None = None

    def mark(self) -> tuple[object, ...]:
        """Of the generators before the first run."""
        return self._surroundings.generators.mark(self._rng)

    def __enter__(self) -> None:
        own = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        generators = self._surroundings.generators
        self._outside = outside = _Outside(generators.copies(), own, torch.is_grad_enabled())
        outside.attributes = [(held, name, held.get(name)) for held, name, _ in self._attributes]
        try:
            for held, name, value in self._attributes:
                held[name] = value
            # clones, since the run changes them and another replay may follow
            _put_buffers([(module, name, saved.clone()) for module, name, saved in self._buffers])
            outside.modes = _switch(self._modes)
            generators.put_copies(self._rng)
            # the setter, since a context manager costs as much as all else here
            torch._C._set_grad_enabled(True)
            if self._autocast != self._surroundings.autocast():
                outside.autocast = self._enter_autocast()
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *_: object) -> None:
        self._put_back()

    def _put_back(self) -> None:
        outside, self._outside = self._outside, None
        assert outside is not None
        if outside.autocast is not None:
            outside.autocast.close()
        torch._C._set_grad_enabled(outside.grad_enabled)
        _switch(outside.modes)
        _put_buffers(outside.buffers)
        for held, name, value in outside.attributes:
            held[name] = value
        self._surroundings.generators.put_copies(outside.rng)

    def _enter_autocast(self) -> ExitStack:
        cache_enabled, states = self._autocast
        with ExitStack() as stack:
            for device_type, enabled, dtype in states:
                stack.enter_context(
                    torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
                )
            return stack.pop_all()


class _Outside:
    """What a replay puts back."""

    __slots__ = ("attributes", "autocast", "buffers", "grad_enabled", "modes", "rng")

    def __init__(
        self,
        rng: Sequence[torch.Generator],
        buffers: Sequence[tuple[nn.Module, str, torch.Tensor | None]],
        grad_enabled: bool,
    ) -> None:
        self.rng = rng
        self.buffers = buffers
        self.grad_enabled = grad_enabled
        self.autocast: ExitStack | None = None
        self.attributes: list[_Attribute] = []
        self.modes: Sequence[tuple[nn.Module, str, bool]] = ()


def _buffer(module: nn.Module, name: str) -> torch.Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer.detach()


def _put_buffers(buffers: Sequence[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def _switch(modes: Sequence[tuple[nn.Module, str, bool]]) -> list[tuple[nn.Module, str, bool]]:
    """Set what is otherwise than in `modes`; returns what that was."""
    before = []
    for module, name, value in modes:
        if name == TRAINING:
            if module.training is not value:
                before.append((module, name, not value))
                module.training = value
        elif (parameter := getattr(module, name, None)) is not None and parameter.requires_grad is not value:
            before.append((module, name, not value))
            parameter.requires_grad_(value)
    return before
