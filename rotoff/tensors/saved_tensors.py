"""What autograd saves in a run that is only looked at: no backward follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import MeasureError


def watch_saved(look: Callable[[torch.Tensor], object]) -> saved_tensors_hooks:
    """Within this, `look` is called with each tensor that autograd saves, in order; what it returns stays in the graph
    in its place."""
    return saved_tensors_hooks(look, _never)


def _never(_: Any) -> torch.Tensor:
    raise MeasureError(
        "the forward differentiates (torch.autograd.grad, backward), which rotoff cannot follow: have the training"
        " loop do that, outside of the model that is planned"
    )


def foreign_hooks() -> tuple[str, str] | None:
    """What to say of saved-tensor hooks that are active and neither torch's nor rotoff's, as a predicate and its end:
    planned steps have hooks of their own."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or str(getattr(hooks[0], "__module__", "")).split(".")[0] in ("torch", "rotoff"):
        return None
    name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
    return (
        f"runs under saved-tensor hooks ({name})",
        ", which planned steps, having their own, would pass by: leave them out",
    )
