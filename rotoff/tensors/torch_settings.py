"""PyTorch's settings that bytes and times depend on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .autocast import in_region
from .kernel_flags import kernel_flags


def bytes_by_default() -> AbstractContextManager[object]:
    """Within, tensors that are made without a device have bytes, also where the caller's default is ``meta``."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


def settings_of_torch(types: Sequence[str]) -> dict[str, Any]:
    """Return PyTorch's settings that bytes and times depend on. types: of devices, for autocast."""
    return {
        "autocast": [[t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))] for t in types],
        "region": in_region(),
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "kernels": [*map(str, kernel_flags()), torch.is_autocast_cache_enabled()],
    }
