"""Calls that a ``TorchFunctionMode`` does not see: those of modules, custom Functions and scripted functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.backends import ContextProp

from ..capture.collectives import collectives_visible, several_processes
from ..capture.interception import APPLIES, APPLY, ARRAYS_SEEN, SEEN_APPLY, Patches, without_checkpoints
from ..capture.unrepeatable import derivatives_refused
from ..tensors.kernel_flags import SETTERS

if TYPE_CHECKING:
    from .live import LiveForward


class _Followed(threading.local):
    live: LiveForward | None = None


_FOLLOWED = _Followed()


@contextmanager
def following(live: LiveForward) -> Iterator[None]:
    """Within, in this thread, `live` intercepts all calls."""
    before = _FOLLOWED.live
    _FOLLOWED.live = live
    try:
        collectives = collectives_visible() if several_processes() else nullcontext()
        with derivatives_refused(), _SEEN, ARRAYS_SEEN, collectives, without_checkpoints(), live:
            yield
    finally:
        _FOLLOWED.live = before


def as_call_of(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Return `run()`, which the present `LiveForward` sees as a call of `module`."""
    live = _FOLLOWED.live
    return run() if live is None else live.called(module, (), {}, run)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled = torch.compiler.is_dynamo_compiling()  # 2.11's compiler cannot read thread-locals
    live = None if compiled else _rotoff_followed.live  # type: ignore[name-defined]  # noqa: F821
    if live is None or live.inside:
        if live is not None and live.applying:
            live.reached(self)
        return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
    return live.called(self, args, kwargs)


# This replaces the code of ``nn.Module.__call__``, not the attribute. When the attribute is set, Python visits all
# subclasses, which takes a millisecond, and clears their method caches; from 3.13 on it stops caching after a thousand
# times.
_CALL: Any = vars(nn.Module)["_wrapped_call_impl"]
_CALL.__globals__["_rotoff_followed"] = _FOLLOWED


def _apply(apply: Any) -> Any:
    def wrapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        live = _FOLLOWED.live
        return apply(cls, *args, **kwargs) if live is None else live.applied(MethodType(apply, cls), *args, **kwargs)

    return wrapped


def _script(call: Any) -> Any:
    def wrapped(function: Any, *args: Any, **kwargs: Any) -> Any:
        live = _FOLLOWED.live
        return (
            call(function, *args, **kwargs) if live is None else live.applied(partial(call, function), *args, **kwargs)
        )

    return wrapped


def _flag(setter: Any) -> Any:
    """Have a forward that sets a flag compare all flags around each of its calls from then on."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if (live := _FOLLOWED.live) is not None:
            live.sets_flags = True
        return setter(*args, **kwargs)

    return wrapped


_SEEN = Patches(
    (_CALL, "__code__", lambda _: _call.__code__),
    (APPLIES, "now", _apply),
    (APPLY, "__code__", lambda _: SEEN_APPLY),
    (torch.jit.ScriptFunction, "__call__", _script),
    (ContextProp, "__set__", _flag),
    *((torch._C, name, _flag) for name in SETTERS),
)
