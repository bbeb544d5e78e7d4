"""Hollow tensors: they keep shape and graph but not their bytes; a single shared number is expanded to their shape."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.collectives import several_processes
from ..tensors.storage import local, uses_of
from ._follow import TAG, Var

LETTING_GO = 0.2  # seconds


def current_key(tensor: torch.Tensor) -> int:
    """Return a key that identifies the storage in which a tensor lies now; the tensor's id if it has none."""
    try:
        return (tensor if type(tensor) is torch.Tensor else local(tensor)).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


# the attribute of a hollow tensor that holds a weak reference to its storage, its offset, shape and strides there
GEOMETRY = "_rotoff_geometry"


def empty(tensor: torch.Tensor) -> None:
    """Release a tensor's bytes."""
    shape = tensor.shape
    stub = _stub(shape, tensor.dtype, tensor.device)
    if current_key(tensor) != current_key(stub):
        storage = StorageWeakRef(local(tensor).untyped_storage())
        setattr(tensor, GEOMETRY, (storage, tensor.storage_offset(), shape, tensor.stride()))
    tensor.data = stub


def whole_base(tensor: torch.Tensor) -> None:
    """Before an in-place change of a view, put its hollow base back into the storage of the view: autograd reads the
    base's shape and strides."""
    base = tensor._base
    if base is not None and (geometry := vars(base).pop(GEOMETRY, None)) is not None:
        with torch.no_grad():
            base.data = _laid(base, tensor.untyped_storage(), geometry)
        if (var := vars(base).get(TAG)) is not None:
            var.hollow = False


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor may lie in the storage of this one."""
    # a lone tensor's storage has two holders: this tensor, and the object that stands for the storage in Python
    return tensor._base is not None or tensor.layout is not torch.strided or uses_of(tensor) > 2


def renew_graph(view: torch.Tensor) -> None:
    """Before a view is read: after an in-place change of what it shares a storage with, autograd makes its graph anew,
    from the shape and strides of its base, which may be hollow."""
    base = view._base
    geometry = None if base is None else vars(base).get(GEOMETRY)
    if base is not None and geometry is not None and current_key(base) != current_key(view):
        stub = base.data
        base.data = _laid(base, view.untyped_storage(), geometry)
        view.grad_fn  # noqa: B018  (this makes it)
        base.data = stub


def _laid(tensor: torch.Tensor, storage: torch.UntypedStorage, geometry: Sequence[Any]) -> torch.Tensor:
    """Return what `tensor` was in its own storage, in this one."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *geometry[1:])


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


class Frames:
    """The tensors that one forward makes: the frames of the model's own code may hold them.

    every: all of them. resident: storages from before the stages, by key.
    """

    def __init__(self, resident: Container[int]) -> None:
        self.every: list[Var] = []
        self._hollowed: list[Var] = []
        self._resident = resident

    def hollow(self, var: Var) -> None:
        """Free the bytes of a tensor that a frame may still hold."""
        tensor = var()
        if tensor is None or var.stays or var.hollow or tensor.is_conj() or tensor.is_neg():
            return
        if tensor.requires_grad and tensor.is_leaf:  # the graph holds it, since it is to get a gradient
            return
        base = tensor._base
        if base is not None:  # the graph of a view holds it
            known = vars(base).get(TAG)
            if (known is None or known.gone) and current_key(base) not in self._resident:
                empty(base)
        empty(tensor)
        var.hollow = var.gone = True
        self._hollowed.append(var)

    def fill(self, var: Var, content: torch.Tensor) -> None:
        """Make `content` the bytes of a tensor."""
        tensor = var()
        if tensor is not None:
            if var.hollow or current_key(tensor) != current_key(content):
                tensor.data = content
            if tensor._base is None:  # if it is the base of views, its bytes are no longer only for them
                var.gone = False
        var.hollow = False

    def sharing(self, every: Sequence[Var]) -> list[Var]:
        """Return `every`, and all hollow tensors that lay in a storage with one of these."""
        found = dict.fromkeys(every)
        storages = {key for var in every if (key := self.key(var)) is not None}
        return [*found, *(v for v in self._hollowed if v.hollow and v not in found and self.key(v) in storages)]

    def key(self, var: Var) -> int | None:
        """Return the key of the storage in which the tensor of `var` lies, or lay before it was hollowed; None if the
        tensor is gone."""
        tensor = var()
        if tensor is None:
            return None
        return vars(tensor)[GEOMETRY][0].cdata if var.hollow else current_key(tensor)

    def put_back(self, var: Var) -> bool:
        """Fill a hollow tensor from its own storage; returns False if that is gone. If something else holds the
        storage, both are changed by a change of either, as in the plain model."""
        tensor = var()
        assert tensor is not None
        geometry = vars(tensor)[GEOMETRY]
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(geometry[0].cdata)  # None if it is gone
        if storage is None:
            return False
        self.fill(var, _laid(tensor, storage, geometry))
        return True

    def held(self) -> list[Var]:
        """Return, at the end of the forward, the hollow tensors that something still holds."""
        self.every = [var for var in self.every if var() is not None]
        for var in self.every:
            tensor = var()
            if tensor is not None and not var.gone and tensor._base is not None:  # its base shares its bytes
                whole_base(tensor)
        if several_processes():  # the thread of a collective lets go of its tensors a moment after it has ended
            end = time.monotonic() + LETTING_GO
            while any(var.hollow and var() is not None for var in self._hollowed) and time.monotonic() < end:
                time.sleep(1e-4)
        return list(dict.fromkeys(var for var in self._hollowed if var.hollow and var() is not None))

    def forget(self) -> None:
        """Remove this forward's marks from all tensors that are left."""
        for var in self.every:
            if (tensor := var()) is not None:
                whole_base(tensor)
                vars(tensor).pop(TAG, None)
                vars(tensor).pop(GEOMETRY, None)
        self.every.clear()
