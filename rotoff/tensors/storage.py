"""Storages of tensors: keys that identify them, sizes, and views into them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import MeasureError


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's version counter of `tensor`; 0 if it has none, as a tensor made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


_OWN = frozenset([torch.Tensor, torch.nn.Parameter])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, and any other tensor itself."""
    if type(tensor) in _OWN:
        return tensor
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def in_place_of(known: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as another object; if `known` is a DTensor, return that, with `tensor` as its local shard."""
    if known is None or local(known) is known:
        return tensor.detach()
    shard: Any = known
    if known.device != tensor.device:
        known.data = type(shard)(tensor.detach(), shard._spec, requires_grad=False)
    shard._local_tensor = tensor.detach()
    return known


is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass  # its own type would narrow too much


def stored(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors that have the bytes of `tensors`: those of which a frozen wrapper, such as a quantized
    parameter, consists, and any other tensor itself."""
    for tensor in tensors:
        if local(tensor) is not tensor or tensor.requires_grad or not is_wrapper(tensor):
            yield tensor
        else:
            names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            yield from stored(getattr(tensor, name) for name in names)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that identifies the tensor's storage.

    Raises:
        MeasureError: if the tensor has no storage, as sparse ones.
    """
    try:
        return local(tensor).untyped_storage()._cdata
    except NotImplementedError:
        raise MeasureError(
            f"the model works on a {str(tensor.layout).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)};"
            " rotoff counts the bytes of dense tensors only: gather rows and add them up (index_select, index_add)"
            " instead, or keep this part outside of the planned model"
        ) from None


def uses_of(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of `tensor`."""
    return torch._C._storage_Use_Count(local(tensor).untyped_storage()._cdata)


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with storages that a tensor consists of: two for a sparse one, such as the gradient of
    ``nn.Embedding(sparse=True)``."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether the host's memory of `tensor` is shared with other processes. PyTorch has no allocator for its storage,
    which cannot be resized, whatever ``resizable()`` says."""
    return tensor.device.type == "cpu" and tensor.is_shared()


class View(NamedTuple):
    """The layout of a tensor in a storage. conj, neg: whether it is a lazy view of the complex conjugate, or of the
    negation."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    @property
    def end(self) -> int:
        """Bytes of the storage up to the last one that the tensor shows."""
        last = self.offset + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize if self.size.numel() else 0

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor with its bytes in `storage`."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            made = torch._conj(made)
        return torch._neg_view(made) if self.neg else made


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return `storage` as a 1-d uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_VIEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at = _VIEW(("PyMemoryView_FromMemory", ctypes.pythonapi))


def memory_of(data: torch.UntypedStorage | torch.Tensor) -> memoryview:
    """Return the bytes of a storage of the CPU, or of a contiguous tensor; unlike after ``tensor.numpy()`` it can be
    resized, as FSDP does, and is none of NumPy's."""
    nbytes = data.nbytes if isinstance(data, torch.Tensor) else data.nbytes()
    return _memory_at(data.data_ptr(), nbytes, 0x200)  # to be read and written


def rounded(nbytes: int, block: int) -> int:
    """Return `nbytes` rounded up to a multiple of `block`."""
    return -(-nbytes // block) * block


def dispatches(t: torch.Tensor) -> bool:
    """Whether operations on a tensor call its class, as those on a tensor that wraps others."""
    return type(t).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is no more than a geometry of a storage, for operations. All others (sparse, nested, quantized,
    mapped, wrapped) stay as they are."""
    return (
        not dispatches(t)
        and t.layout is torch.strided
        and not (t.is_quantized or t.is_nested or t.is_mkldnn or t.is_meta or t._is_zerotensor())
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )
