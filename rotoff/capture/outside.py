"""What a ``TorchFunctionMode`` does not see: calls of modules, custom Functions and scripted functions; other random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def seen_calls(called: Callable[..., Any], applied: Callable[..., Any]) -> Iterator[None]:
    """Within, calls go through `called(original, module, *args)` and `applied(original, function, *args)`."""
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    scripted: Any = torch.jit.ScriptFunction
    script_call = scripted.__call__

    def wrapped_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(call, module, *args, **kwargs)

    def wrapped_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(apply.__get__(None, cls), cls, *args, **kwargs)

    def wrapped_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(partial(script_call, function), function, *args, **kwargs)

    nn.Module.__call__ = wrapped_call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(wrapped_apply)  # type: ignore[method-assign,assignment]
    scripted.__call__ = wrapped_script
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        scripted.__call__ = script_call


def run_within(args: tuple[Any, ...]) -> Any:
    """What the reentrant ``torch.utils.checkpoint`` computes of the arguments of its `CheckpointFunction`, by calls that can be seen: it
    gives no gradients where none of its inputs needs one."""
    run, _, *given = args
    needed = any(isinstance(t, torch.Tensor) and t.requires_grad for t in given)
    with nullcontext() if needed else torch.no_grad():
        return run(*given)


def other_generators() -> list[Any]:
    """The states of Python's generator and, where it is loaded, NumPy's."""
    found: list[Any] = [random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found.append((kind, keys.tobytes(), *rest))
    return found


def put_other_generators(states: list[Any]) -> None:
    """Undo what was drawn since `other_generators` gave `states`."""
    random.setstate(states[0])
    if len(states) > 1 and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = states[1]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
