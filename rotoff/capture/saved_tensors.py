"""What autograd saves in a run that is only looked at: no backward follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


def watch_saved(look: Callable[[torch.Tensor], object]) -> saved_tensors_hooks:
    """Within this, `look` is called with each tensor that autograd saves, in order; what it returns stays in the graph in its place."""
    return saved_tensors_hooks(look, _never)


def _never(_: Any) -> torch.Tensor:
    raise AssertionError("the graph of a run that is only looked at is never run")
