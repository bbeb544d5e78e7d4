"""Saves what a run overwrites, and restores it after a run that must leave no trace."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .storage import is_plain, version_of


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
    """Restore the `content` of a tensor, which may have been resized since, and its version counter."""
    if not torch.equal(tensor, content):
        with torch.no_grad():
            (tensor if tensor.shape == content.shape else tensor.resize_(content.shape)).copy_(content)
    if version_of(tensor) != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
