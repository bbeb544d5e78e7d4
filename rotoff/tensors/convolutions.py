"""By which algorithms the convolutions of a stage run on CUDA: those that the user's flags pick, or others in fewer
bytes.

SuperNeurons (section 3.5) buys speed with the bytes that are left at a layer, since cuDNN's faster convolutions take a
workspace. What PyTorch 2.11 to 2.13 lets one choose for a single call (ATen/native/Convolution.cpp, cudnn/Conv_v8.cpp):

- ``torch.backends.cudnn.enabled``: without cuDNN, PyTorch's own kernels unfold one sample at a time and multiply
  matrices.
- ``deterministic``: cuDNN may take deterministic algorithms alone, often others with another workspace.
- Not ``benchmark``: the plans that cuDNN found are kept by shape, type and ``deterministic``, for each thread; a plan
  found with the one value of ``benchmark`` is used with the other as well. So it stays as the user has it.
- Not the size of a workspace: CUDNN_CONV_WSCAP_DBG is read by cuDNN itself, and what is kept does not depend on it.

The flags are the process's, and read when an operation runs: also in a backward, which runs on a thread of its own. In
a forward they change around each convolution alone, since batch norm looks at ``enabled`` too and would save other
tensors. In a backward, where every other operation is what its forward made it, they change for the whole stage.
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

from ..errors import OptionError

NAMES = ("convolution", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))


class Algorithms(Enum):
    """Which algorithms a convolution may run by, where that is not the flags' choice."""

    DETERMINISTIC = "deterministic"  # of cuDNN's, those that are
    NATIVE = "native"  # none of cuDNN's


def read_conv_algorithms(value: Any) -> bool:
    """Whether the option `conv_algorithms` allows other algorithms than the plain model's.

    Raises:
        OptionError: where it is neither "plain" nor "any".
    """
    if value not in ("plain", "any"):
        raise OptionError(
            f"conv_algorithms is {value!r}; give 'plain' (convolutions run as in the plain model, the default) or 'any'"
            " (by whatever algorithm of CUDA suits the limit: gradients are no longer the plain model's bit for bit)"
        )
    return bool(value == "any")


def other_algorithms(device: torch.device) -> tuple[Algorithms, ...]:
    """What convolutions on `device` may run by beside what the flags in force pick; none on a CPU, or with cuDNN
    switched off."""
    if device.type != "cuda" or not torch._C._get_cudnn_enabled():
        return ()
    if torch._C._get_cudnn_deterministic() or torch.are_deterministic_algorithms_enabled():
        return (Algorithms.NATIVE,)
    return Algorithms.DETERMINISTIC, Algorithms.NATIVE


def flags() -> tuple[bool, bool, bool]:
    """What the choice of an algorithm depends on: whether cuDNN is enabled, deterministic, and benchmarks."""
    return torch._C._get_cudnn_enabled(), torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()


def _set(algorithms: Algorithms) -> Callable[[], None]:
    """Set the flags for `algorithms`; returns what puts back the one that was changed."""
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
    """Convolutions that Python code calls within run by `algorithms`; None: as the flags say."""
    if algorithms is None:
        yield
    else:
        with _Convolutions(algorithms):
            yield


class StageAlgorithms:
    """Which stages of one step run by other algorithms, and the flags while the backward of one of them does."""

    def __init__(self) -> None:
        self._of: dict[int, Algorithms] = {}
        self._put_back: Callable[[], None] | None = None
        self._guarded = False

    def plain(self, i: int) -> None:
        """The ā_i that is made next is the whole stage's own."""
        self._of.pop(i, None)

    def ran(self, i: int, algorithms: Algorithms | None) -> None:
        """The forward of stage i that made ā_i ran by these; its backward will."""
        self.plain(i)
        if algorithms is not None:
            self._of[i] = algorithms

    def begin_backward(self, i: int) -> None:
        """Autograd runs the backward of stage i next; to be called within that backward."""
        if (algorithms := self._of.pop(i, None)) is not None:
            if not self._guarded:
                # Where a backward fails autograd calls nobody, but lets go of what it would have called: where a device
                # has a thread of its own, just after the caller has seen the error.
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
    """Calls `act` when it is called itself, or let go."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self) -> None:
        self._act()

    def __del__(self) -> None:
        self._act()


@cache
def _functions() -> frozenset[Any]:
    """Every Python function that runs a convolution."""
    packets = [getattr(torch.ops.aten, name) for name in NAMES]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return frozenset([*(getattr(torch, name) for name in NAMES), *packets, *overloads])
