"""Refuses what needs all gradients with ``updates="during"``, clipping, scaling and the steps of other optimizers: each
gradient is gone as soon as it is complete, so they would silently do nothing, or harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...capture.interception import Patches
from ...errors import ExecutionError
from .groups import PlacedGroups
from .updates import parameters_of

_guards: list[Guard] = []


class Guard:
    """Until it is closed, clipping the gradients of the placed parameters, scaling losses that depend on them, and the
    step of an optimizer that is given used-up gradients of them raise ExecutionError."""

    def __init__(self, groups: PlacedGroups) -> None:
        self._groups = groups
        self.keys = {id(p) for p in groups.every()}
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        _guards.append(self)
        _PATCHES.__enter__()

    def close(self) -> None:
        """Allow all again; may be called twice."""
        if self in _guards:
            _guards.remove(self)
            _PATCHES.__exit__()
            self._hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is one for one in self._groups.optimizers):
            used_up = (
                self._groups.places[id(p)].gradient.marked for p in parameters_of(optimizer) if id(p) in self.keys
            )
            if any(used_up):
                raise ExecutionError(
                    'this optimizer was not given to compute_sequence, and with updates="during" the gradients of its'
                    " parameters are gone; give it, or call zero_grad() of those that were given before its step"
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


_PATCHES = Patches(
    (clip_grad, "_clip_grads_with_norm_", _clipping),  # `clip_grad_norm_` calls it, wherever that was imported
    (clip_grad, "clip_grad_value_", _clipping),
    (nn.utils, "clip_grad_value_", _clipping),
    (torch.amp.GradScaler, "scale", _scaling),
)
