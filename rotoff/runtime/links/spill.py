"""Where a step without a plan keeps what it moves off the device: in a file if that is the CPU, else in the memory of
the host."""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass

import torch

from ...errors import ExecutionError
from ...tensors.storage import bytes_of, memory_of
from .host_file import HostFile, check_directory, choose_directory

logger = logging.getLogger("rotoff")
GROWTH = 64 << 20  # bytes that the file gets at a time


@dataclass(frozen=True)
class Away:
    """What was moved: `copy` on the host (or on the device, if that is all there is), or bytes of the file from
    `offset` on."""

    device: torch.device
    nbytes: int
    copy: torch.Tensor | None
    offset: int


class Spill:
    """Keeps storages until it is collected.

    device: of the step; what lies elsewhere stays there. directory: of the file; None: the first of the usual temporary
    directories that is on a disk.
    """

    def __init__(self, device: torch.device, directory: str | os.PathLike[str] | None = None) -> None:
        self.device, self._directory = device, directory
        self._file: HostFile | None = None
        self._end = 0
        self._full = False

    def put(self, storage: torch.UntypedStorage) -> Away:
        """Copy a storage. If the disk has no room for it, it stays where it is, and the log says so once.

        Raises:
            rotoff.ExecutionError: if no directory is on a disk.
        """
        nbytes = storage.nbytes()
        if storage.device.type != "cpu":
            return Away(storage.device, nbytes, bytes_of(storage).cpu(), 0)
        if self._full or self.device.type != "cpu":
            return Away(storage.device, nbytes, bytes_of(storage), 0)
        if self._file is None:
            chosen = choose_directory() if self._directory is None else check_directory(self._directory)
            self._file = HostFile(chosen)
            weakref.finalize(self, self._file.close)
        if self._end + nbytes > self._file.capacity:
            try:
                self._file.reserve(self._end + max(nbytes, GROWTH))
            except ExecutionError as error:
                self._full = True
                logger.warning(
                    "rotoff: a step without a plan may exceed the limit, since what it saves cannot leave the device:"
                    " %s",
                    error,
                )
                return self.put(storage)
        away = Away(storage.device, nbytes, None, self._end)
        self._file.write(memory_of(storage), away.offset)
        self._end += nbytes
        return away

    def get(self, away: Away) -> torch.UntypedStorage:
        """Return a storage with these bytes, on the device where they were."""
        if away.copy is not None:
            return away.copy.to(away.device).untyped_storage()
        storage = torch.UntypedStorage(away.nbytes)
        assert self._file is not None
        self._file.read(memory_of(storage), away.offset)
        return storage
