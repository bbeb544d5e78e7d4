"""A tensor without its bytes: shape and graph stay, and one number stands for all of its own."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from ..tensors.storage import local


def key_of(tensor: torch.Tensor) -> int:
    """Tells the storage of a tensor from others."""
    try:
        return local(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


GEOMETRY = "_rotoff_geometry"  # the attribute of a hollow tensor that holds how it lay


def empty(tensor: torch.Tensor) -> None:
    """Take a tensor's bytes."""
    shape = tensor.shape
    if GEOMETRY not in tensor.__dict__:
        setattr(tensor, GEOMETRY, (tensor.storage_offset(), shape, tensor.stride()))
    tensor.data = _stub(shape, tensor.dtype, tensor.device)


def whole_base(tensor: torch.Tensor) -> None:
    """A change in place of a view asks how its base lies, and so has to find it in the storage of the view."""
    base = tensor._base
    if base is not None and (geometry := vars(base).pop(GEOMETRY, None)) is not None:
        with torch.no_grad():
            base.data = torch.empty(0, dtype=base.dtype, device=base.device).set_(tensor.untyped_storage(), *geometry)


@lru_cache(maxsize=1024)
def _stub(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One number that stands for all of a tensor's."""
    return _number(dtype, device).expand(shape)


@cache
def _number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Which all stubs of a kind share: not a number, so that whoever reads it unseen shows."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    room = torch.frombuffer(bytearray(dtype.itemsize), dtype=torch.uint8)  # Python's own: no step is charged for it
    number = (room if device.type == "cpu" else room.to(device)).view(dtype)[0]
    return number.fill_(value).detach()
