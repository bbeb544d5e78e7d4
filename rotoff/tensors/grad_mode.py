"""Recording for a backward whatever mode the model's code is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch


def recording() -> AbstractContextManager[object]:
    """A context in which autograd records operations, also within ``no_grad`` or ``inference_mode``."""
    if torch.is_grad_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    return stack
