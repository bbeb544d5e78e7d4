"""Chooses the algorithms of a stage's convolutions on CUDA: those of the user's flags, or others that take fewer bytes.

SuperNeurons (section 3.5) buys speed with the bytes that are left at a layer, since cuDNN's faster convolutions take a
workspace. PyTorch 2.11 to 2.13 allows these choices for a single call (ATen/native/Convolution.cpp, cudnn/Conv_v8.cpp):

- ``torch.backends.cudnn.enabled``: without cuDNN, PyTorch's own kernels unfold one sample at a time and multiply
  matrices.
- ``deterministic``: cuDNN may use only deterministic algorithms, often others with another workspace.
- Not ``benchmark``: each thread caches cuDNN's plans by shape, type and ``deterministic``, and uses a plan that was
  found with one value of ``benchmark`` for the other value, too. So it stays as the user has set it.
- Not the workspace size: cuDNN itself reads CUDNN_CONV_WSCAP_DBG, and the cached plans do not depend on it.

The flags are global and are read when an operation runs, also in a backward, which has a thread of its own. In a
forward they change only around each convolution, because batch norm reads ``enabled`` too and would save other tensors.
In a backward, where the forward has determined every other operation, they change for the whole stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode

from ..accelerator import is_accelerator
from ..errors import OptionError

NAMES = ("convolution", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))


class Algorithms(Enum):
    """Algorithms for convolutions other than those that the user's flags choose."""

    DETERMINISTIC = "deterministic"  # cuDNN's deterministic ones
    NATIVE = "native"  # PyTorch's own, without cuDNN


def read_conv_algorithms(value: Any) -> bool:
    """Whether the option `conv_algorithms` allows other algorithms than the plain model's.

    Raises:
        OptionError: if it is neither "plain" nor "any".
    """
    if value not in ("plain", "any"):
        raise OptionError(
            f"conv_algorithms is {value!r}; give 'plain' (convolutions run as in the plain model, the default) or 'any'"
            " (on CUDA, any algorithm that suits the limit: gradients no longer equal the plain model's bit for bit)"
        )
    return bool(value == "any")


def other_algorithms(device: torch.device) -> tuple[Algorithms, ...]:
    """Return the alternatives to the present flags' choice on `device`; none on a CPU or if cuDNN is disabled."""
    if not is_accelerator(device) or not torch._C._get_cudnn_enabled():
        return ()
    if torch._C._get_cudnn_deterministic() or torch.are_deterministic_algorithms_enabled():
        return (Algorithms.NATIVE,)
    return Algorithms.DETERMINISTIC, Algorithms.NATIVE


def _set(algorithms: Algorithms) -> Callable[[], None]:
    """Set the flag for `algorithms`; returns a function that restores it."""
    if algorithms is Algorithms.NATIVE:
        set_flag, before, now = torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled(), False
    else:
        set_flag, before, now = torch._C._set_cudnn_deterministic, torch._C._get_cudnn_deterministic(), True
    set_flag(now)
    return lambda: set_flag(before)


class _Convolutions(TorchFunctionMode):
    """Sets the flags around each convolution."""

    def __init__(self, algorithms: Algorithms) -> None:
        super().__init__()
        self._algorithms = algorithms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _functions():
            return func(*args, **(kwargs or {}))
        put_back = _set(self._algorithms)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            put_back()


@contextmanager
def forward_by(algorithms: Algorithms | None) -> Iterator[None]:
    """Run the convolutions that Python code calls in this block by `algorithms`; None: by the user's flags."""
    if algorithms is None:
        yield
    else:
        with _Convolutions(algorithms):
            yield


class StageAlgorithms:
    """Remembers which stages of a step ran by other algorithms, and sets the flags during their backwards."""

    def __init__(self) -> None:
        self._of: dict[int, Algorithms | None] = {}
        self._put_back: Callable[[], None] | None = None
        self._guarded = False

    def ran(self, i: int, algorithms: Algorithms | None) -> None:
        """The forward of stage i that made ā_i ran by `algorithms`, None for the user's flags; so will its backward."""
        self._of[i] = algorithms

    def begin_backward(self, i: int) -> None:
        """Autograd runs the backward of stage i next; to be called within that backward."""
        if (algorithms := self._of.pop(i, None)) is not None:
            if not self._guarded:
                # If a backward fails, autograd does not call this callback, but destroys it; on a device with a thread
                # of its own, this happens just after the caller has seen the error.
                Variable._execution_engine.queue_callback(_Finally(self._over))
                self._guarded = True
            self._put_back = _set(algorithms)

    def end_backward(self) -> None:
        """Put the flags back; harmless when repeated."""
        put_back, self._put_back = self._put_back, None
        if put_back is not None:
            put_back()

    def _over(self) -> None:
        self._guarded = False
        self.end_backward()


class _Finally:
    """Calls `act` when it is called or destroyed."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self) -> None:
        self._act()

    def __del__(self) -> None:
        self._act()


@cache
def _functions() -> frozenset[Any]:
    """Return every Python function that runs a convolution."""
    packets = [getattr(torch.ops.aten, name) for name in NAMES]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return frozenset([*(getattr(torch, name) for name in NAMES), *packets, *overloads])
