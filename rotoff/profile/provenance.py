"""What a chain file says about the origin of its numbers: the ``meta`` of a chain, plain JSON."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn

from ..accelerator import is_accelerator, name_of
from ..tensors.tree import flatten
from ..version import __version__
from .estimate.devices import Device


def provenance(model: nn.Module, value: Any, device: torch.device | Device) -> dict[str, Any]:
    """Return the model, the shapes of its input, the device and the versions that a chain was measured or estimated
    with.

    Args:
        device: on which the model was measured, or the `Device` for which it was estimated.
    """
    parameters = list(model.parameters())
    estimated = isinstance(device, Device)
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trained_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in model.buffers()),
        "inputs": [{"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for t in flatten(value)[0]],
        "device": device.name if isinstance(device, Device) else device_name(device),
        "times": "estimated from operation counts and the device's data sheet" if estimated else "measured",
        "bytes": "estimated from shapes, without most temporaries inside kernels" if estimated else "measured",
        "versions": {"rotoff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        **({} if estimated else {"threads": torch.get_num_threads()}),
    }


def device_name(device: torch.device) -> str:
    """Return the device's name for people."""
    if is_accelerator(device):
        return name_of(device)
    return f"{platform.machine()} {platform.processor()}".strip() if device.type == "cpu" else str(device)
