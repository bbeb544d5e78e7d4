"""Refuses, with ``updates="during"``, what needs all gradients at once: clipping, scaling, steps of other optimizers.
Each gradient is gone as soon as it is complete, so these would silently do nothing, or harm."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ExecutionError
from .updates import parameters_of

_guards: list[Guard] = []
_closed: list[Guard] = []  # while there are marks of theirs
_own: list[Any] = []  # what is in the places of `_PATCHES` without guards
_lock = threading.RLock()  # a garbage collection may close another guard


class Marks:
    """What stands in ``parameter.grad`` for gradients that a backward has used up. It outlives the model.

    awaited: whether an ``optimizer.step()`` has yet to find that nothing is left to do.
    """

    def __init__(self) -> None:
        self.awaited = False
        self._marked: list[tuple[weakref.ref[nn.Parameter], torch.Tensor]] = []

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the gradients of these are marks."""
        self._marked = [(weakref.ref(p), p.grad) for p in parameters if p.grad is not None]

    def left(self) -> list[nn.Parameter]:
        """Return the parameters that still have one."""
        alive = ((parameter(), mark) for parameter, mark in self._marked)
        return [p for p, mark in alive if p is not None and p.grad is mark]

    def remove(self) -> None:
        """Clear those gradients."""
        for parameter in self.left():
            parameter.grad = None


class Guard:
    """Refuses, until it is closed, clipping the gradients of `parameters` and scaling losses that depend on them; and,
    as long as there are marks, the steps of optimizers that would take these for gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
        self.keys = {id(p) for p in parameters}
        self.marks = Marks()
        self._optimizers = weakref.WeakSet(optimizers)
        with _lock:
            if not _guards:
                _own[:] = [vars(owner)[name] for owner, name, _ in _PATCHES]
                _put(refusing(own) for (*_, refusing), own in zip(_PATCHES, _own, strict=True))
            _guards.append(self)
        _watch_steps()

    def close(self) -> None:
        """Allow clipping and scaling again; may be called twice."""
        with _lock:
            if self in _guards:
                _guards.remove(self)
                _put([] if _guards else _own)
        self._optimizers.clear()
        if self.marks.awaited:  # the backward has updated the parameters; the step finds nothing to do
            self.marks.remove()
        elif self.marks.left():
            _closed.append(self)

    def lets(self, optimizer: Optimizer) -> bool:
        """Whether a step of `optimizer` takes no mark for a gradient."""
        wrapped = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
        if any(one in self._optimizers for one in (optimizer, *wrapped)):
            return True  # the placement hides the marks
        theirs = set(map(id, parameters_of(optimizer)))
        return not any(id(p) in theirs for p in self.marks.left())


@functools.cache
def _watch_steps() -> None:
    """Have each step of an optimizer come by, from now on: a hook cannot be removed while steps run."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _closed[:] = [guard for guard in _closed if guard.marks.left()]
    if not all(guard.lets(optimizer) for guard in (*_guards, *_closed)):
        raise ExecutionError(
            'updates="during" has used up gradients of this optimizer\'s parameters; call zero_grad() before its step,'
            " or give it to compute_sequence"
        )


def _refusing(what: str) -> ExecutionError:
    return ExecutionError(
        f'{what} needs all gradients at once, and updates="during" updates each parameter within the backward; plan'
        ' with updates="after"'
    )


def _clipping(own: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(id(p) in guard.keys for guard in _guards for p in given):
            raise _refusing("clipping")
        return own(given, *args, **kwargs)

    return clip


def _scaling(own: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        given = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if self.is_enabled() and any(id(p) in guard.keys for guard in _guards for p in _leaves(given)):
            raise _refusing("a GradScaler")
        return own(self, outputs if isinstance(outputs, torch.Tensor) else given)

    return scale


def _leaves(outputs: list[Any]) -> Iterator[Any]:
    """Yield the leaves that a backward of `outputs` would give gradients to, each as soon as it is found."""
    seen: set[Any] = set()
    todo = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor)]
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
            todo += [of for of, _ in node.next_functions]


# owner, name, function that makes the new value from the old one
_PATCHES: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (clip_grad, "_clip_grads_with_norm_", _clipping),  # `clip_grad_norm_` calls it, wherever that was imported
    (clip_grad, "clip_grad_value_", _clipping),
    (nn.utils, "clip_grad_value_", _clipping),
    (torch.amp.GradScaler, "scale", _scaling),
]


def _put(values: Iterable[Any]) -> None:
    for (owner, name, _), value in zip(_PATCHES, values, strict=False):
        setattr(owner, name, value)
