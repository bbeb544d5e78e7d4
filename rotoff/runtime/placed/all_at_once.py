"""What looks at all gradients together finds none where each is gone as soon as it is whole: it is refused, since it
would do nothing without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from ...capture.outside import Patches
from ...errors import ExecutionError

_guards: list[Guard] = []


class Guard:
    """From now until it is closed, clipping the gradients of `parameters` and scaling losses are refused."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.keys = {id(p) for p in parameters}
        _guards.append(self)
        _PATCHES.__enter__()

    def close(self) -> None:
        """Harmless when repeated."""
        if self in _guards:
            _guards.remove(self)
            _PATCHES.__exit__()


def _refusing(what: str) -> ExecutionError:
    return ExecutionError(
        f'{what} needs all gradients at once, and updates="during" updates each parameter within the backward; plan with updates="after"'
    )


def _clipping(own: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(id(p) in guard.keys for guard in _guards for p in given):
            raise _refusing("clipping")
        return own(given, *args, **kwargs)

    return clip


def _scaling(own: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            raise _refusing("a GradScaler")
        return own(self, *args, **kwargs)

    return scale


_PATCHES = Patches(
    (clip_grad, "_clip_grads_with_norm_", _clipping),  # by which `clip_grad_norm_` works, whoever has imported that
    (clip_grad, "clip_grad_value_", _clipping),
    (nn.utils, "clip_grad_value_", _clipping),
    (torch.amp.GradScaler, "scale", _scaling),
)
