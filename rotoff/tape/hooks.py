"""The hooks by which a tape takes what autograd saves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _autograd

from .tape import Tape

_lock = threading.Lock()
_within = 0
_disable = _autograd._saved_tensors_hooks_disable


@contextmanager
def taking_saved(tape: Tape) -> Iterator[None]:
    """`tape` takes what autograd saves within, beside derivatives of ``torch.func``: PyTorch refuses these where there
    are hooks, since most fail on a tensor that it maps, and a tape leaves such a tensor as it is."""
    _count(1)
    try:
        with tape, torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
            yield
    finally:
        _count(-1)


def _count(more: int) -> None:
    global _within
    with _lock:
        _within += more
        _autograd._saved_tensors_hooks_disable = _disable_more if _within else _disable


def _disable_more(message: str, fail_if_non_empty: bool = True) -> None:
    """Disable further hooks, whether or not there are some."""
    _disable(message, False)
