"""Hollow tensors: they keep shape and graph but not their bytes; a single shared number is expanded to their shape."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from ..tensors.storage import local


def key_of(tensor: torch.Tensor) -> int:
    """Return a key that identifies the tensor's storage; the tensor's id if it has none."""
    try:
        return local(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


GEOMETRY = "_rotoff_geometry"  # the attribute of a hollow tensor that holds its offset, shape and strides


def empty(tensor: torch.Tensor) -> None:
    """Release a tensor's bytes."""
    shape = tensor.shape
    if GEOMETRY not in tensor.__dict__:
        setattr(tensor, GEOMETRY, (tensor.storage_offset(), shape, tensor.stride()))
    tensor.data = _stub(shape, tensor.dtype, tensor.device)


def whole_base(tensor: torch.Tensor) -> None:
    """Before an in-place change of a view, put its hollow base back into the storage of the view: autograd reads the
    base's shape and strides."""
    base = tensor._base
    if base is not None and (geometry := vars(base).pop(GEOMETRY, None)) is not None:
        with torch.no_grad():
            base.data = torch.empty(0, dtype=base.dtype, device=base.device).set_(tensor.untyped_storage(), *geometry)


@lru_cache(maxsize=1024)
def _stub(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one number expanded to `shape`."""
    return _number(dtype, device).expand(shape)


@cache
def _number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the number that all stubs of this kind share: NaN, so that an unnoticed read shows in the results."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    room = torch.frombuffer(bytearray(dtype.itemsize), dtype=torch.uint8)  # Python's own: no step is charged for it
    number = (room if device.type == "cpu" else room.to(device)).view(dtype)[0]
    return number.fill_(value).detach()
