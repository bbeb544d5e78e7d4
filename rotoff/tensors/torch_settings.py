"""PyTorch's settings that bytes and times depend on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def bytes_by_default() -> AbstractContextManager[object]:
    """Within, tensors that are made without a device have bytes, also where the caller's default is ``meta``."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


def in_region() -> bool:
    """Whether an autocast region is open, even one that is switched off: regions within it keep their casts of
    weights until it is left."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
