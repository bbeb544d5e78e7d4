"""Base classes of rotoff's modes: ``torch.compile`` does not compile them, and they do not import it unnecessarily."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A dispatch mode that ``torch.compile`` skips once it is loaded.

    PyTorch ensures this for every mode, but by a wrapper whose first call imports all of ``torch._dynamo``, which takes
    more than a second. Without any wrapper, compiling a function within a module would compile the mode's own method
    too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        if "torch._dynamo" in sys.modules:
            for one in type(self).__mro__:
                own = vars(one).get("__torch_dispatch__")
                if issubclass(one, EagerMode) and own is not None and not vars(one).get("_kept", False):
                    one.__torch_dispatch__ = torch.compiler.disable(own)  # type: ignore[method-assign]
                    one._kept = True  # type: ignore[attr-defined]
        return super().__enter__()


_NO_KWARGS: dict[str, Any] = {}  # nobody changes it


class EagerFunctionMode(TorchFunctionMode):
    """A function mode that ``torch.compile`` does not see: a function compiled within it runs as without it.

    Subclasses implement `call`. A compiler that traces ``__torch_function__`` finds only the original function.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # is_compiling() is slower
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or _NO_KWARGS)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of torch."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        if "torch._dynamo" in sys.modules and not vars(type(self)).get("_kept", False):
            from torch._dynamo.eval_frame import skip_code

            skip_code(EagerFunctionMode.__torch_function__.__code__)
            type(self).call = torch.compiler.disable(type(self).call)  # type: ignore[method-assign]
            type(self)._kept = True  # type: ignore[attr-defined]
        return super().__enter__()


class without:
    """Context in which `mode` is removed, if it is the innermost one."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._popped = _get_current_function_mode() is self._mode
        if self._popped:
            _pop_mode()

    def __exit__(self, *_: object) -> None:
        if self._popped:
            _push_mode(self._mode)


def unseen(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` as where no function mode is on."""
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


class Unwatched:
    """Context in which the innermost mode does not see what is asked of tensors. A function that it must see is called
    as `watched`."""

    def __init__(self) -> None:
        self._mode = _get_current_function_mode()

    def __enter__(self) -> Unwatched:
        if self._mode is not None:
            _pop_mode()
        return self

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            _push_mode(self._mode)

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` to be called under the mode."""
        mode = self._mode
        if mode is None:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            _push_mode(mode)
            try:
                return function(*args, **kwargs)
            finally:
                _pop_mode()

        return call
