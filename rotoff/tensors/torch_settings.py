"""PyTorch's settings that bytes and times depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .autocast import in_region
from .kernel_flags import kernel_flags


def settings_of_torch(types: Sequence[str]) -> dict[str, Any]:
    """Return PyTorch's settings that bytes and times depend on. types: of devices, for autocast."""
    return {
        "autocast": [[t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))] for t in types],
        "region": in_region(),
        "precision": torch.get_float32_matmul_precision(),
        "kernels": [*map(str, kernel_flags()), torch.is_autocast_cache_enabled()],
    }
