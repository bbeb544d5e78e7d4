"""Saves buffers and what a run overwrites, and restores them after a run that must leave no trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .storage import is_plain, version_of


def same_content(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; fake tensors always are."""
    return isinstance(tensor, FakeTensor) or torch.equal(tensor, other)


class BufferCopies:
    """Copies of `buffers`, each given with its module and name; `put_back` restores them in place."""

    def __init__(self, buffers: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
        self._saved = [(module, name, one, one.detach().clone(), version_of(one)) for module, name, one in buffers]

    def put_back(self) -> None:
        with torch.no_grad():
            for module, name, buffer, content, version in self._saved:
                put_back(buffer, content, version)
                module._buffers[name] = buffer


class Originals:
    """What a run overwrites of `tensors`, if `keep` is called with each storage before it is written; `put_back`
    restores it, with the version counters, and the storages that ``.data`` has replaced."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [(one, one.data, version_of(one)) for one in tensors if is_plain(one)]
        self._storages = {data.untyped_storage()._cdata for _, data, _ in self._tensors}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Copy a storage, if it is one of theirs and was not copied yet."""
        if (key := storage._cdata) in self._storages and key not in self._copies:
            self._copies[key] = storage, storage.clone()

    def put_back(self) -> None:
        for storage, copy in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for tensor, data, version in self._tensors:
            if tensor.untyped_storage()._cdata != data.untyped_storage()._cdata or tensor.shape != data.shape:
                tensor.data = data
            if version_of(tensor) != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def put_back(tensor: torch.Tensor, content: torch.Tensor, version: int) -> None:
    if not same_content(tensor, content):
        as_large_as(tensor, content).copy_(content)
    if version_of(tensor) != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def as_large_as(tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the shape of `content`, which it had before something resized it."""
    return tensor if tensor.shape == content.shape else tensor.resize_(content.shape)


def buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return every buffer of `model`, with its module and name."""
    return [(m, name, one) for m in model.modules() for name, one in m._buffers.items() if one is not None]
