"""Intercepts what a ``TorchFunctionMode`` does not see: calls of modules, custom Functions and scripted functions, and
the random generators of Python and NumPy."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import checkpoint as checkpoints

_CALLED: Any = nn.Module.__call__
_SCRIPTED: Any = torch.jit.ScriptFunction.__call__


class _Seen:
    """Holds the replacement of ``Function.apply``; a method in a class, because the replaced code has a ``__class__``
    cell."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        __class__  # type: ignore[name-defined]  # noqa: B018
        return _rotoff_applied(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821


# The code of ``Function.apply`` is replaced and not the attribute, because models keep ``activation = Function.apply``.
APPLY: Any = vars(torch.autograd.Function)["apply"].__func__
APPLY_CODE = APPLY.__code__
SEEN_APPLY = _Seen.apply.__code__
APPLIES = SimpleNamespace(
    now=FunctionType(APPLY_CODE, APPLY.__globals__, "apply", APPLY.__defaults__, APPLY.__closure__)
)
_OWN_APPLY = APPLIES.now
APPLY.__globals__["_rotoff_applied"] = lambda cls, args, kwargs: APPLIES.now(cls, *args, **kwargs)


# custom Functions and operators that have drawn from the generators of Python or NumPy
DRAWERS: weakref.WeakSet[Any] = weakref.WeakSet()
_CALLING = (torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_)  # call a function of the caller's
_NATIVE = frozenset(["aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "quantized"])


def code_of(function: Any) -> Any:
    """Return what has code of its own that `function`, a call that is recorded as one, runs: a custom or scripted
    Function, a custom operator, ``Tensor.apply_``; None for all other functions of torch."""
    if type(function) is partial:  # a scripted function
        return function.args[0]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner
    if isinstance(function, torch._ops.OpOverload):
        return None if function.namespace in _NATIVE else function
    if isinstance(function, torch._ops.OpOverloadPacket):
        return None if function._qualified_op_name.partition("::")[0] in _NATIVE else function
    return function if any(function is one for one in _CALLING) else None


def may_draw(code: Any) -> bool:
    """Whether a call that runs this `code_of` its own may draw from the generators of Python and NumPy."""
    return code in _CALLING or code in DRAWERS


def custom_function(function: Any) -> str:
    """Return the name of the custom Function, not torch's own, that `function` calls; "" if it is none."""
    code = code_of(function)
    return code.__name__ if isinstance(code, type) and not code.__module__.startswith("torch.") else ""


@contextmanager
def intercept_calls(called: Callable[..., Any], applied: Callable[..., Any]) -> Iterator[None]:
    """Route calls through `called(original, module, *args)` and `applied(function, original, of, *args)`: `function` is
    what PyTorch calls, `original` what is installed now."""
    call, apply, script_call = nn.Module.__call__, APPLIES.now, torch.jit.ScriptFunction.__call__

    def wrapped_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(call, module, *args, **kwargs)

    def wrapped_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(MethodType(_OWN_APPLY, cls), MethodType(apply, cls), cls, *args, **kwargs)

    def wrapped_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(partial(_SCRIPTED, function), partial(script_call, function), function, *args, **kwargs)

    with _calling(wrapped_call, SEEN_APPLY, wrapped_apply, wrapped_script), ARRAYS_SEEN:
        yield


def without_interception() -> AbstractContextManager[None]:
    """Restore PyTorch's own calls, so that a compiler can trace them."""
    return _calling(_CALLED, APPLY_CODE, _OWN_APPLY, _SCRIPTED)


def _calling(call: Any, code: Any, apply: Any, script_call: Any) -> Patches:
    """Return patches that install these calls of modules, custom Functions and scripted functions. code: of
    ``Function.apply``."""
    return Patches(
        (nn.Module, "__call__", lambda _: call),
        (APPLIES, "now", lambda _: apply),
        (APPLY, "__code__", lambda _: code),
        (torch.jit.ScriptFunction, "__call__", lambda _: script_call),
    )


class Patches:
    """Replaces attributes while any thread is inside.

    Args:
        places: (owner, name, function that makes the new value from the old one).
    """

    def __init__(self, *places: tuple[Any, str, Callable[[Any], Any]]) -> None:
        self._places = places
        self._before: list[Any] = []
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before = [vars(owner).get(name) or getattr(owner, name) for owner, name, _ in self._places]
                for (owner, name, wrapped), old in zip(self._places, self._before, strict=True):
                    setattr(owner, name, wrapped(old))
            self._count += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                for (owner, name, _), old in zip(self._places, self._before, strict=True):
                    setattr(owner, name, old)


def _dispatched(from_numpy: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    return lambda array: torch.as_tensor(array, device="cpu") if isinstance(array, np.ndarray) else from_numpy(array)


# within, a ``TorchFunctionMode`` sees ``torch.from_numpy``, too
ARRAYS_SEEN = Patches((torch, "from_numpy", _dispatched))
_OPEN = threading.local()


class _Nothing:
    """Replaces the generator around the function of the other form. It is told of an error, which goes on anyway."""

    def __init__(self) -> None:
        self._once = iter([None])

    def __next__(self) -> None:
        next(self._once)

    def throw(self, _error: BaseException) -> None:
        pass


def _generator(own: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _Nothing() if getattr(_OPEN, "checkpoints", False) else own(*args, **kwargs)

    return wrapped


class _Reentrant:
    """Replaces the `CheckpointFunction` of the reentrant form, which gives no gradients if none of its inputs needs
    one."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def apply(self, run: Callable[..., Any], preserve: bool, *given: Any) -> Any:
        if not getattr(_OPEN, "checkpoints", False):
            return self._own.apply(run, preserve, *given)
        needed = any(isinstance(t, torch.Tensor) and t.requires_grad for t in given)
        with nullcontext() if needed else torch.no_grad():
            return run(*given)


_CHECKPOINTS = Patches(
    (checkpoints, "_checkpoint_without_reentrant_generator", _generator),
    (checkpoints, "CheckpointFunction", _Reentrant),
)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` only run its function in this thread: rotoff decides what is recomputed."""
    before = getattr(_OPEN, "checkpoints", False)
    _OPEN.checkpoints = True
    try:
        with _CHECKPOINTS:
            yield
    finally:
        _OPEN.checkpoints = before


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


def noting_draws(function: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does `run`, a call of `function`, and adds to `DRAWERS` its code if that draws."""
    code = code_of(function)
    if code is None or may_draw(code):
        return run

    def noted(*args: Any, **kwargs: Any) -> Any:
        before = other_generators()
        result = run(*args, **kwargs)
        if other_generators() != before:
            DRAWERS.add(code)
        return result

    return noted
