"""A replay sees what the first run saw, and leaves no trace.

Before its first run a stage that will run again notes the random number generators, the buffers that its forward changes
and the autocast state; a replay runs on those and puts everything back after.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import string_at
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.stage import TRAINING

RNG_BYTES = 5056  # of the CPU generator's state; a CUDA generator's is 16 bytes of host memory


States = tuple[bytes, ...]  # of generators


def _state(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


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
        """What tells the present states, or those of `copies`, from others; of the CPU's the next numbers, since its state is large."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return ()  # nothing is drawn
        own = self.copies() if copies is None else copies
        return *_next_numbers(own[0]), *(bytes(copy.get_state().tolist()) for copy in own[1:])

    def put_copies(self, copies: Sequence[torch.Generator]) -> None:
        for generator, copy in zip(self._own, copies, strict=True):
            generator.set_state(copy.get_state())

    def begin(self) -> list[torch.Generator]:
        """`copies`, for a run that will be repeated from them.

        They are put back at once on CUDA, since that draws more than it changes: cuDNN's recurrent layers take their dropout from
        a buffer of their own that goes on from run to run, and is filled anew, by the generator, in the first run after its state
        was put (`get_dropout_state` in PyTorch's cudnn/RNN.cpp). Every repetition puts it, so the first run must find it put too.
        """
        copies = self.copies()
        for generator, copy in list(zip(self._own, copies, strict=True))[1:]:
            generator.set_state(copy.get_state())
        return copies

    def put(self, states: States) -> None:
        for generator, state in zip(self._own, states, strict=True):
            generator.set_state(_state(state))


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
    """What one stage's first run saw. Within ``with`` everything is as it was before that run; after, as it was outside.

    Args:
        surroundings: of the step. buffers: (module, name) of every buffer that the stage's forward changes. attributes: likewise, of
            every attribute that it sets, with its bytes. modes: what was measured (`StageModule.modes`), and so what that run saw;
            a GAN thaws its discriminator before the backward of the generator's loss.
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
            (vars(module), name, vars(module)[name]) for module, name, _ in attributes if restorable(vars(module).get(name))
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
                stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled))
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


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Autocast's cache of weights is off within: a run does the same operations whatever ran before it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


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
        elif (parameter := module._parameters.get(name)) is not None and parameter.requires_grad is not value:
            before.append((module, name, not value))
            parameter.requires_grad_(value)
    return before


def restorable(value: Any) -> bool:
    """Whether an attribute that holds `value` is one that a replay gets back: a number, a text, or a tensor without a graph."""
    return type(value) in (bool, int, float, str) or (type(value) is torch.Tensor and not value.requires_grad)


def same_content(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; fake ones have no content that could differ."""
    return isinstance(tensor, FakeTensor) or torch.equal(tensor, other)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # which those do not have


@contextmanager
def preserved(buffers: Sequence[tuple[nn.Module, str, torch.Tensor]], device: torch.device) -> Iterator[None]:
    """Generators and `buffers` are after the block what they were before it, in place, whatever ran within: versions too, since a graph that
    still waits for its backward may have saved them."""
    generators = Generators(device)
    rng = generators.states()
    try:
        with buffers_preserved(buffers):
            yield
    finally:
        generators.put(rng)


@contextmanager
def buffers_preserved(buffers: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> Iterator[None]:
    """`preserved`, of buffers alone."""
    saved = [(module, name, buffer, buffer.detach().clone(), _version(buffer)) for module, name, buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, content, version in saved:
                if not same_content(buffer, content):
                    buffer.copy_(content)
                if _version(buffer) != version:
                    torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))
                module._buffers[name] = buffer
